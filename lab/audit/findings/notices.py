"""Notices: what a student should know of, though it is no fault (exit status 0)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from common.say import listed
from lab.audit.findings.endings import came_to_end, short_epochs_of
from lab.audit.findings.epochs import (
    TrainingStep,
    is_sequential,
    loader_line,
    local_batches,
    training_loaders,
    training_steps,
)
from lab.audit.findings.finding import Finding, found
from lab.audit.findings.where import (
    backward_line,
    exchange_line,
    first_records,
)
from lab.audit.recording import Recording
from lab.audit.records import Autocast, Backward, CodeLine, Evaluation, Loader, Step


def check(recording: Recording) -> Iterator[Finding]:
    """Yield the notices on a run."""
    if len(recording.ranks) < 2:
        return
    parts = (_batchnorm, _shares, _accumulation, _uneven_batches, _autocast, _random_evaluation)
    for part in parts:
        yield from part(recording)


def compare(recordings: Sequence[Recording]) -> Iterator[Finding]:
    """Yield the notices that need runs of two sizes: what grows or shrinks with them."""
    yield from _divided_length(recordings)
    runs = {}  # by number of ranks, the local batch of each rank
    for recording in recordings:
        if recording.global_batch is None and (local := local_batches(recording)):
            runs[recording.size] = local
    local_sizes = {count for local in runs.values() for count in local.values()}
    if len(runs) < 2 or len(local_sizes) > 1:
        return
    sizes = tuple(sorted(runs))
    totals = listed(f"{sum(runs[size].values()):,} with {size} ranks" for size in sizes)
    line = next((line for run in recordings if (line := loader_line(run))), None)
    yield replace(found("batch-grows", line, totals=totals), sizes=sizes)


def _divided_length(recordings: Sequence[Recording]) -> Iterator[Finding]:
    """Compare how many epochs the runs train: a part of those with one rank, and of one in part.

    Where a limit on samples or steps ends the training, epochs or steps are equal. Where the ranks
    stop early, they stop at the end of an epoch.
    """
    texts = []
    of_one_rank = []
    in_part = False
    for recording in recordings:
        epochs = _epochs_trained(recording)
        texts.append(f"{epochs:.3g} with {recording.size} ranks")
        of_one_rank.append(epochs * recording.size)
        in_part = in_part or epochs % 1 > 0
    steps = set(map(attrgetter("steps"), recordings))
    if len(texts) < 2 or not in_part or len(steps) < len(recordings):
        return
    # the number of an epoch's batches is divided, and rounded down
    least = max(of_one_rank) * (1 - max(map(_rounded, recordings)))
    if min(of_one_rank) >= least:
        line = recordings[0].of(Step)[0].at
        sizes = tuple(map(attrgetter("size"), recordings))
        notice = found("divided-length", line, sure=False, epochs=listed(texts))
        yield replace(notice, sizes=sizes)


def _epochs_trained(recording: Recording) -> float:
    """Return how many epochs a run trains, the last in part; 0 if that is not known."""
    loaders = training_loaders(recording)
    is_whole = came_to_end(recording) and not short_epochs_of(recording)
    if len(loaders) != 1 or not is_whole:
        return 0.0
    trained = sum(step.batches for step in training_steps(loaders[0][0].records))
    return trained / (loaders[0][0].facts.batches or trained or 1)


def _rounded(recording: Recording) -> float:
    """Return which share of an epoch rounding to one rank's part of it leaves out at most."""
    return max(recording.size / (loader.batches or 1) for loader in recording.of(Loader))


def _autocast(recording: Recording) -> Iterator[Finding]:
    """Check whether a model runs within autocast, if the script enters it to train."""
    contexts = recording.of(Autocast)
    types: set[str] = set()
    for backward in recording.of(Backward):
        for forward in backward.forwards:
            types.update(forward.dtypes)
    if not contexts or any(context.model for context in contexts):
        return
    dtype = contexts[0].dtype
    if types and dtype not in types:
        types_text = listed(sorted(types))
        yield found("autocast-unused", contexts[0].at, dtype=dtype, types=types_text)


def _random_evaluation(recording: Recording) -> Iterator[Finding]:
    """Find an evaluation in which nothing is in training mode, and random numbers are drawn."""
    evaluations = recording.of(Evaluation)
    drawn = [one for one in evaluations if one.drew and one.mode == "eval"]
    if drawn:
        yield found("random-evaluation", drawn[0].at, drawn=len(drawn), all=len(evaluations))


def _batchnorm(recording: Recording) -> Iterator[Finding]:
    """Compare the buffers with which the ranks evaluate after the same step: the worst one."""
    differences: list[tuple[float, CodeLine | None, dict[str, Any]]] = [(0.0, None, {})]
    for step, records in first_records(recording, Evaluation).items():
        (first, reference), *others = sorted(records.items())
        buffers = dict(reference.buffers if reference.batchnorm_layers else ())
        for rank, record in others:
            for name, values in record.buffers:
                relative = _difference(buffers.get(name, []), values)
                where = {"step": step, "rank": rank, "first": first, "buffer": name}
                differences.append((relative, record.at, where))
    relative, at, places = max(differences, key=itemgetter(0))
    if relative > 1e-6:
        yield found("batchnorm-statistics", at, difference=relative, **places)


def _difference(one: list[float], other: list[float]) -> float:
    """Return the relative difference of two buffers, 0 if they cannot be compared."""
    size = np.linalg.norm(one)
    if len(one) != len(other) or not 0 < size < np.inf:
        return 0.0
    return float(np.linalg.norm(np.subtract(one, other)) / size)


def _shares(recording: Recording) -> Iterator[Finding]:
    """Check how the ranks' loaders share the samples out: unshuffled, or a share of a share."""
    for loaders in training_loaders(recording):
        first = [loader.epochs[0] for loader in loaders]
        enough = all(len(epoch.batches) >= 2 and len(epoch.given) >= 8 for epoch in first)
        if enough and all(is_sequential(epoch.given) for epoch in first):
            indices = ", ".join(map(str, first[0].given[:4]))
            line = loaders[0].facts.line
            yield found("no-shuffling", line, rank=loaders[0].rank, indices=indices)
        contents = {loader.facts.content for loader in loaders} - {None}
        sampler_divides = all(loader.facts.replicas == len(loaders) for loader in loaders)
        different_data = len(contents) == len(loaders)
        if sampler_divides and different_data:
            yield found(
                "divided-twice",
                loaders[0].facts.line,
                sure=False,
                rank=loaders[0].rank,
                length=loaders[0].facts.length,
                ranks=len(loaders),
            )


def _accumulation(recording: Recording) -> Iterator[Finding]:
    """Check the steps of several micro-batches, if at least two steps have them on each rank.

    Few of many have them where the script leaves out an update now and then.
    """
    steps: list[TrainingStep] = []
    for rank in recording.ranks:
        every = training_steps(rank)
        accumulated = [step for step in every if step.accumulates]
        steps += accumulated
        few = len(accumulated) < max(2, len(every) / 2)
        if few or len(recording.ranks) < recording.size:
            return
    micro = steps[0].batches
    if all(map(_adds_up, steps)):
        yield found("summed-accumulation", backward_line(recording), micro=micro)
    if all(map(_ddp_averages_each, steps)) or all(map(_exchanges_each, steps)):
        line = exchange_line(recording, 0) or backward_line(recording)
        yield found("needless-communication", line, micro=micro)


def _ddp_averages_each(step: TrainingStep) -> bool:
    return all(backward.synced is True for backward in step.backwards)


def _exchanges_each(step: TrainingStep) -> bool:
    return step.exchanged == set(range(1, step.batches + 1))


def _adds_up(step: TrainingStep) -> bool:
    """Return whether each micro-batch has a mean as its loss that arrives undivided."""
    for backward in step.backwards:
        loss = backward.loss
        if loss is None or loss.reduction != "mean":
            return False
        if not abs(loss.arriving / step.scale - 1) < 1e-3:  # also if it is NaN
            return False
    return True


def _uneven_batches(recording: Recording) -> Iterator[Finding]:
    """Compare the ranks' samples in a step; by rounding alone they may differ slightly."""
    local = local_batches(recording)
    if local is None:
        return
    (least, fewer), *_, (greatest, more) = sorted((local[rank], rank) for rank in local)
    if greatest <= 1.1 * least + 1:
        return
    if all(_adds_up(step) for rank in recording.ranks for step in training_steps(rank)):
        yield found(
            "uneven-batches",
            loader_line(recording) or backward_line(recording),
            least=least,
            fewer=fewer,
            greatest=greatest,
            more=more,
            times=greatest / least,
        )
