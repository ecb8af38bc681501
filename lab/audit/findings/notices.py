"""Notices: what a student should know of, though it is no fault (exit status 0)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from lab.audit.findings.finding import Finding, Outcome
from lab.audit.findings.samples.coverage import whole_epochs
from lab.audit.findings.samples.epochs import Index, is_sequential, training_loaders
from lab.audit.findings.samples.steps import TrainingStep, local_batches, training_steps
from lab.audit.recording import Record, Recording


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield the notices on a run."""
    if len(recording.ranks) < 2:
        return
    yield from _batchnorm_statistics(recording)
    yield from _equal_dropout(recording)
    yield from _shares(recording)
    yield from _accumulation(recording)
    yield from _uneven_batches(recording)


def compare(recordings: Sequence[Recording]) -> Iterator[Finding]:
    """Yield the notices that need runs of two sizes: whether the global batch grows with them."""
    runs = {
        one.size: local
        for one in recordings
        if one.global_batch is None and (local := local_batches(one)) is not None
    }
    if len(runs) < 2 or len({count for local in runs.values() for count in local.values()}) > 1:
        return
    listed = " and ".join(
        f"{sum(runs[size].values()):,} with {size} ranks" for size in sorted(runs)
    )
    sizes = tuple(sorted(runs))
    yield Finding("batch-grows", (f"samples in a step: {listed}",), sizes=sizes)


def _batchnorm_statistics(recording: Recording) -> Iterator[Outcome]:
    """Compare the buffers with which the ranks evaluate after the same step."""
    by_step: dict[int, dict[int, Record]] = defaultdict(dict)
    for rank in recording.ranks:
        for record in rank.by_kind["eval"]:
            if record["batchnorm"]:
                by_step[record["step"]].setdefault(rank.rank, record)
    differences = []
    for step, records in by_step.items():
        first = min(records)
        buffers = dict(records[first]["buffers"])
        for other in sorted(records)[1:]:
            for name, values in records[other]["buffers"]:
                difference = _difference(buffers.get(name), values)
                differences.append((difference, step, other, first, name))
    if not differences:
        return
    greatest, step, other, first, name = max(differences)
    if greatest > 1e-6:
        yield Finding(
            "batchnorm-statistics",
            (
                f"after {step} steps, rank {other} evaluates with statistics that differ from rank "
                f"{first}'s by up to {greatest:.2%} ({name}): each rank evaluates another model",
            ),
        )


def _difference(one: list[float] | None, other: list[float]) -> float:
    """Return the relative difference of two buffers, 0 if they cannot be compared."""
    if one is None or len(one) != len(other) or not one:
        return 0.0
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / size if size > 0 and np.isfinite(size) else 0.0


def _equal_dropout(recording: Recording) -> Iterator[Outcome]:
    """Compare the ranks' random states at the first dropout of each step."""
    states: dict[int, dict[int, object]] = defaultdict(dict)
    for rank in recording.ranks:
        for record in rank.by_kind["random"]:
            states[record["step"]].setdefault(rank.rank, record["hash"])
    full = [by_rank for by_rank in states.values() if len(by_rank) == recording.size > 1]
    if len(full) >= 2 and all(len(set(by_rank.values())) == 1 for by_rank in full):
        yield Finding(
            "equal-dropout",
            (f"all {recording.size} ranks have the same random state in all {len(full)} steps",),
        )


def _shares(recording: Recording) -> Iterator[Outcome]:
    for loaders in training_loaders(recording):
        first = [_first_indices(one.epochs[0].batches) for one in loaders]
        if all(len(row) >= 8 and is_sequential(row) for row in first):
            listed = ", ".join(map(str, first[0][:4]))
            yield Finding(
                "no-shuffling", (f"rank {loaders[0].rank} draws samples {listed}, … in order",)
            )
        contents = {one.facts.get("content") for one in loaders} - {None}
        divides = all(one.facts.get("replicas") == len(loaders) for one in loaders)
        if divides and len(contents) == len(loaders):
            length = loaders[0].facts["length"]
            text = f"every rank's dataset holds other data: of the {length:,} samples of rank "
            text += f"{loaders[0].rank}'s, the sampler gives it one in {len(loaders)}"
            yield Finding("divided-twice", (text,), sure="likely")
        whole = next(whole_epochs(loaders), None)
        if whole and whole.replicas == whole.size and 0 < whole.repeats <= whole.tolerance:
            total, number = whole.counts.total(), len(whole.counts)
            yield Finding(
                "padding-sampler",
                (f"{number:,} samples are drawn {total:,} times in an epoch",),
            )


def _first_indices(batches: Sequence[Sequence[Index]]) -> list[Index]:
    """Return the indices of at least two batches, else none."""
    return [index for batch in batches for index in batch] if len(batches) >= 2 else []


def _accumulation(recording: Recording) -> Iterator[Outcome]:
    """Check the steps of several micro-batches, if at least two steps have them on each rank."""
    steps = [
        [step for step in training_steps(rank) if step.accumulates] for rank in recording.ranks
    ]
    if len(steps) < recording.size or any(len(row) < 2 for row in steps):
        return
    everything = [step for row in steps for step in row]
    micro = everything[0].batches
    if all(_adds_up(step) for step in everything):
        yield Finding(
            "summed-accumulation",
            (f"each of {micro} micro-batches has a mean as its loss, not divided by {micro}",),
        )
    if all(_exchanges_each(step) for step in everything):
        yield Finding(
            "needless-communication",
            (f"gradients are exchanged {micro} times a step, in each micro-batch",),
        )


def _adds_up(step: TrainingStep) -> bool:
    """Return whether each micro-batch has a mean as its loss that arrives undivided."""
    losses = [backward["loss"] or {} for backward in step.backwards]
    return all(
        loss.get("reduction") == "mean" and abs((loss.get("arriving") or 0) / step.scale - 1) < 1e-3
        for loss in losses
    )


def _exchanges_each(step: TrainingStep) -> bool:
    """Return whether the gradients of each micro-batch are exchanged, by DDP or by hand."""
    by_ddp = all(backward.get("synced") is True for backward in step.backwards)
    return by_ddp or step.exchanged == set(range(1, step.batches + 1))


def _uneven_batches(recording: Recording) -> Iterator[Outcome]:
    """Compare the ranks' samples in a step; by rounding alone they may differ slightly."""
    local = local_batches(recording) or {0: 0}
    least, greatest = min(local, key=local.__getitem__), max(local, key=local.__getitem__)
    steps = [step for rank in recording.ranks for step in training_steps(rank)]
    if local[greatest] > 1.1 * local[least] + 1 and all(map(_adds_up, steps)):
        times = local[greatest] / local[least]
        yield Finding(
            "uneven-batches",
            (
                f"a step has {local[least]:,} samples on rank {least} and {local[greatest]:,} on "
                f"rank {greatest}, so a sample of rank {least} counts {times:.3g} times as much",
            ),
        )
