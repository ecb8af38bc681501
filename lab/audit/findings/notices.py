"""Notices: what a student should know of, though it is no fault (exit status 0)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lab.audit.findings.epochs import (
    TrainingStep,
    is_sequential,
    local_batches,
    training_loaders,
    training_steps,
)
from lab.audit.findings.finding import Finding, found
from lab.audit.recording import Record, Recording


def check(recording: Recording) -> Iterator[Finding]:
    """Yield the notices on a run."""
    parts = (_batchnorm, _equal_dropout, _shares, _accumulation, _uneven_batches)
    for part in parts if len(recording.ranks) > 1 else ():
        yield from part(recording)


def compare(recordings: Sequence[Recording]) -> Iterator[Finding]:
    """Yield the notices that need runs of two sizes: whether the global batch grows with them."""
    local = {one.size: local_batches(one) for one in recordings if one.global_batch is None}
    runs = {size: counts for size, counts in local.items() if counts}
    if len(runs) > 1 and len({count for local in runs.values() for count in local.values()}) == 1:
        sizes = tuple(sorted(runs))
        totals = " and ".join(f"{sum(runs[size].values()):,} with {size} ranks" for size in sizes)
        yield replace(found("batch-grows", totals=totals), sizes=sizes)


def _first_records(recording: Recording, kind: str) -> dict[int, dict[int, Record]]:
    """Return by step and rank the first record of a kind."""
    by_step: dict[int, dict[int, Record]] = defaultdict(dict)
    for rank in recording.ranks:
        for record in rank.by_kind[kind]:
            by_step[record["step"]].setdefault(rank.rank, record)
    return by_step


def _batchnorm(recording: Recording) -> Iterator[Finding]:
    """Compare the buffers with which the ranks evaluate after the same step."""
    differences = []
    for step, records in _first_records(recording, "eval").items():
        (first, reference), *others = sorted(records.items())
        buffers = dict(reference["buffers"]) if reference["batchnorm"] else {}
        differences += [
            (_difference(buffers.get(name, []), values), step, rank, first, name)
            for rank, record in others
            for name, values in record["buffers"]
        ]
    greatest, step, rank, first, name = max(differences, default=(0.0, 0, 0, 0, ""))
    if greatest > 1e-6:
        yield found(
            "batchnorm-statistics",
            difference=greatest,
            buffer=name,
            step=step,
            rank=rank,
            first=first,
        )


def _difference(one: list[float], other: list[float]) -> float:
    """Return the relative difference of two buffers, 0 if they cannot be compared."""
    size = np.linalg.norm(one) if len(one) == len(other) else 0.0
    return float(np.linalg.norm(np.subtract(one, other)) / size) if 0 < size < np.inf else 0.0


def _equal_dropout(recording: Recording) -> Iterator[Finding]:
    """Compare the ranks' random states at the first dropout of the first six steps.

    Later one rank may have drawn alone, as by evaluating after an epoch.
    """
    states = [
        {record["hash"] for record in records.values()}
        for step, records in _first_records(recording, "random").items()
        if step < 6 and len(records) == recording.size
    ]
    if len(states) >= 2 and all(len(hashes) == 1 for hashes in states):
        yield found("equal-dropout", ranks=recording.size, steps=len(states))


def _shares(recording: Recording) -> Iterator[Finding]:
    for loaders in training_loaders(recording):
        first = [one.epochs[0] for one in loaders]
        enough = all(len(one.batches) >= 2 and len(one.given) >= 8 for one in first)
        if enough and all(is_sequential(one.given) for one in first):
            yield found("no-shuffling", rank=loaders[0].rank, indices=str(first[0].given[:4])[1:-1])
        contents = {one.facts.get("content") for one in loaders} - {None}
        divides = all(one.facts.get("replicas") == len(loaders) for one in loaders)
        if divides and len(contents) == len(loaders):
            yield found(
                "divided-twice",
                sure=False,
                rank=loaders[0].rank,
                length=loaders[0].facts["length"],
                ranks=len(loaders),
            )


def _accumulation(recording: Recording) -> Iterator[Finding]:
    """Check the steps of several micro-batches, if at least two steps have them on each rank."""
    by_rank = [
        [step for step in training_steps(rank) if step.accumulates] for rank in recording.ranks
    ]
    steps = [*chain.from_iterable(by_rank)]
    if len(by_rank) < recording.size or min(map(len, by_rank)) < 2:
        return
    if all(map(_adds_up, steps)):
        yield found("summed-accumulation", micro=steps[0].batches)
    by_ddp = all(one.get("synced") is True for step in steps for one in step.backwards)
    if by_ddp or all(one.exchanged == set(range(1, one.batches + 1)) for one in steps):
        yield found("needless-communication", micro=steps[0].batches)


def _adds_up(step: TrainingStep) -> bool:
    """Return whether each micro-batch has a mean as its loss that arrives undivided."""
    losses = [backward["loss"] or {} for backward in step.backwards]
    return all(
        loss.get("reduction") == "mean" and abs((loss.get("arriving") or 0) / step.scale - 1) < 1e-3
        for loss in losses
    )


def _uneven_batches(recording: Recording) -> Iterator[Finding]:
    """Compare the ranks' samples in a step; by rounding alone they may differ slightly."""
    local = sorted((count, rank) for rank, count in (local_batches(recording) or {0: 0}).items())
    (least, fewer), (greatest, more) = local[0], local[-1]
    steps = chain.from_iterable(map(training_steps, recording.ranks))
    if greatest > 1.1 * least + 1 and all(map(_adds_up, steps)):
        yield found(
            "uneven-batches",
            least=least,
            fewer=fewer,
            greatest=greatest,
            more=more,
            times=greatest / least,
        )
