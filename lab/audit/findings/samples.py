"""Findings about samples: which ones each rank trains on, in which order, and how many.

Samples are compared by their innermost index, per loader and within one epoch. Equal indices are
equal samples only if the ranks hold the same data, see ``epochs.same_data``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, pairwise, takewhile
from math import gcd
from typing import Any

from lab.audit.findings.epochs import (
    Epoch,
    Index,
    TrainingLoader,
    is_sequential,
    local_batches,
    same_data,
    training_loaders,
    training_steps,
)
from lab.audit.findings.finding import Outcome, Right, Unknown, found, gravest
from lab.audit.recording import RankRecords, Recording

Loaders = Sequence[TrainingLoader]
_SAME = 0.9  # the share of two batches, and of all batches, from which on they are the same
_MANY = 4  # epochs in a row that end early: the script takes one batch of each, so compare them


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is found about the samples of a run."""
    if recording.global_batch is not None:
        yield _global_batch(recording, recording.global_batch)
    if len(recording.ranks) < 2:
        return
    groups = training_loaders(recording)
    parts = [[step.takes_a_part for step in training_steps(rank)] for rank in recording.ranks]
    if groups and any(2 * sum(steps) > len(steps) for steps in parts):
        yield Unknown("the samples: the ranks compute on other samples than their loaders give")
    else:
        for loaders in groups:
            yield from filter(None, _check_loaders(recording, loaders))
    if not any(epoch.batches for group in groups for one in group for epoch in one.epochs):
        yield _same_inputs(recording)


def _check_loaders(recording: Recording, loaders: Loaders) -> Iterator[Outcome | None]:
    """Compare the ranks' loaders that belong together."""
    pairs = [_compare(*pair) for pair in combinations(loaders, 2)]
    data = [known for _, known in pairs]
    alike: list[Outcome | None] = [one for one, _ in pairs if not isinstance(one, Right)]
    yield from alike or [pairs[0][0]]
    if not any(alike) and False not in data:
        yield _coverage(recording, loaders, one_dataset=None not in data)
    yield from _same_order(loaders)
    yield _batch_counts(recording, loaders)
    yield from _padding(loaders)


def _global_batch(recording: Recording, asked: int) -> Outcome:
    """Compare the samples of a step on all ranks with what was asked for.

    A local batch may be rounded either way, in each micro-batch.
    """
    local = local_batches(recording)
    if local is None:
        return Unknown("the global batch: the samples of a step are not known on every rank")
    total = sum(local.values())
    steps = [step for rank in recording.ranks for step in training_steps(rank)]
    micro = max([1, *(len(step.backwards) for step in steps)])
    if abs(total - asked) < recording.size * micro:
        return Right(f"the global batch is {total:,} samples, as asked for")
    return found("wrong-global-batch", total=total, asked=asked, counts=_by_rank(local))


def _by_rank(counts: dict[int, Any]) -> str:
    return ", ".join(f"rank {rank} has {count:,}" for rank, count in sorted(counts.items()))


def _compare(one: TrainingLoader, other: TrainingLoader) -> tuple[Outcome | None, bool | None]:
    """Compare two ranks' batches of the same number in the same epoch.

    Equal batches whose targets never agree are not the same samples.

    Returns
    -------
    outcome : ``Right`` if no sample of a batch is in the other rank's; None if some are.
    data : whether equal indices are equal samples; None if unknown.
    """
    mine, theirs = one.drawn, other.drawn
    both = [at for at in mine if at in theirs]
    same = bool(both) and len(both) >= _SAME * min(len(mine), len(theirs))
    data, ranks = same_data(one, other), f"ranks {one.rank} and {other.rank}"
    passes = _passes(one.records, other.records)
    agree = {a[1] == b[1] for a, b in passes if None not in (a[1], b[1])}
    if same and agree == {False}:
        data = None if data else False
    if mine and theirs and not (both and data is not False):
        return Right("every rank trains on different samples"), data
    if not same:
        return None, data
    if data is None:
        return Unknown(
            f"whether {ranks} train on the same samples: their indices are equal, but "
            "the audit cannot tell whether they index the same data"
        ), data
    batches = Counter(at[:2] for at in both)
    epoch, batch = min(batches)
    return found(
        "same-samples",
        kind="indices",
        ranks=ranks,
        epoch=epoch,
        batch=batch,
        count=batches[epoch, batch],
        samples=_listed([index for *_, index in both]),
        batches=len(batches),
    ), data


def _listed(samples: Sequence[Index]) -> str:
    return ", ".join(map(str, samples[:4]))


def _passes(*ranks: RankRecords) -> list[tuple[Any, Any]]:
    """Return (inputs, target) of two ranks in each backward that both have, as hashes."""
    mine, theirs = (
        {
            (one["step"], one["micro"]): (
                tuple(forward[1] for forward in one["forwards"]),
                (one["loss"] or {}).get("target_hash"),
            )
            for one in rank.by_kind["backward"]
            if one["forwards"] and all(forward[1] is not None for forward in one["forwards"])
        }
        for rank in ranks
    )
    return [(mine[at], theirs[at]) for at in mine if at in theirs]


def _same_inputs(recording: Recording) -> Outcome:
    """Without indices: compare the ranks' inputs and targets, backward by backward.

    Inputs that never change may be anything, so then equal targets must be known. A model that is
    sharded may rightly compute one sample on several ranks.
    """
    sharded = any(one.by_kind["fsdp"] for one in recording.ranks)
    first, *others = recording.ranks
    for other in () if sharded else others:
        both = _passes(first, other)
        telling = len({a[0] for a, _ in both}) > 1 or all(a[1] is not None for a, _ in both)
        if len(both) >= 2 and telling and all(a == b for a, b in both):
            ranks = f"ranks {first.rank} and {other.rank}"
            return found("same-samples", kind="inputs", ranks=ranks, count=len(both))
    return Unknown("which samples each rank trains on: no DataLoader draws them by index")


def _coverage(recording: Recording, loaders: Loaders, *, one_dataset: bool) -> Outcome | None:
    """Return whether the ranks together see each sample once in an epoch, by the worst epoch.

    An epoch of which only a part is known counts if there is none else.
    """
    replicas, length = _common(loaders, "replicas") or 0, _common(loaders, "length") or 0
    if replicas > recording.size:
        return found(
            "uneven-coverage",
            kind="replicas",
            missing=length - -(-length // replicas) * recording.size,
            length=length,
            replicas=replicas,
            ranks=recording.size,
        )
    epochs = list(enumerate(zip(*(one.epochs for one in loaders), strict=False), 1))
    whole = [one for one in epochs if all(epoch.whole for epoch in one[1])]
    return gravest(_cover(loaders, *one, one_dataset=one_dataset) for one in whole or epochs)


def _cover(
    loaders: Loaders, number: int, epochs: Sequence[Epoch], *, one_dataset: bool
) -> Outcome | None:
    """Return whether samples come twice in an epoch or are left out of it; None without any.

    That they are left out is a fault only if something shows that they were meant to be seen: a
    subset, a validation split or a limit leaves samples out on purpose.
    """
    whole = all(one.whole for one in epochs)
    draws = [one.whole if whole else one.batches for one in epochs]
    shares = [[index for one in rank for index in one["inner"]] for rank in draws]
    if not all(shares):
        return None
    ranks, batch = len(shares), max(len(rank[0]["indices"]) for rank in draws)
    counts = Counter(chain.from_iterable(shares))
    repeats, rounding = counts.total() - len(counts), max(ranks, batch)
    # Each rank may repeat a sample, or with shuffled samples fill up a batch, so that all ranks
    # have equally many. Of the first batches some may come twice by chance.
    in_strides = all(is_sequential(sorted(set(share))) for share in shares)
    padding = ranks * (1 if in_strides else batch)
    if repeats > max(padding, 0 if whole else counts.total() / 10):
        own = max(len(share) - len(set(share)) for share in shares)
        if own > (rounding if whole else 0):
            return Unknown(
                "the coverage of the dataset: the sampler draws samples repeatedly on a rank"
            )
        if not one_dataset:
            return Unknown(
                "the coverage of the dataset: the ranks draw the same indices, but the "
                "audit cannot tell whether these belong to the same data"
            )
        return found(
            "uneven-coverage",
            kind="repeats",
            epoch=number,
            different=len(counts),
            several=sum(count > 1 for count in counts.values()),
        )
    if not whole:
        return Unknown("the coverage of the dataset: the samples of a whole epoch are not known")
    outer = all(one["inner"] == one["indices"] for rank in draws for one in rank)
    length = _common(loaders, "length" if outer else "inner_length")
    if in_strides and max(counts) < (length or 0):  # else they are those of several datasets
        drawn = sorted(counts)
        stride = gcd(*(one - drawn[0] for one in drawn))
        holes = [one for one in range(drawn[0], drawn[-1], stride) if one not in counts]
        if len(holes) > rounding:
            return found(
                "uneven-coverage",
                kind="holes",
                epoch=number,
                count=len(holes),
                first=_listed(holes),
            )
    if length is None:
        return Right("no sample comes twice in an epoch")
    missing = max(0, length - len(counts))
    if missing > ranks * batch:
        return Unknown(
            f"whether {missing:,} of {length:,} samples are left out of each epoch on purpose"
        )
    padded = f", {repeats:,} padded" if repeats else ""
    left = f", {missing:,} left over" if missing else ""
    return Right(f"each epoch covers the dataset once ({length:,} samples{padded}{left})")


def _common(loaders: Loaders, name: str) -> int | None:
    """Return a number that all ranks' loaders have in common, else None."""
    values = {one.facts.get(name) for one in loaders}
    return values.pop() if len(values) == 1 else None


def _padding(loaders: Loaders) -> Iterator[Outcome]:
    """Yield that DistributedSampler repeats samples, fewer than one a rank."""
    replicas, length = _common(loaders, "replicas"), _common(loaders, "length") or 0
    draws = len(loaders) * sum(len(one["indices"]) for one in loaders[0].epochs[0].whole)
    if replicas == len(loaders) > draws - length > 0:
        yield found("padding-sampler", samples=length, draws=draws)


def _same_order(loaders: Loaders) -> Iterator[Outcome]:
    """Compare the first batches of each epoch with those of the epoch before.

    A single batch tells nothing. An epoch that the script left early, as to look at a batch, counts
    only if there is none else and they are many.
    """
    seen = []
    for one in loaders:
        kept = [epoch for epoch in one.epochs if not epoch.left]
        many = len(kept) < 2 and len(one.epochs) >= _MANY
        shown = one.epochs if many else [epoch for epoch in kept if len(epoch.batches) >= 2]
        for number, (first, second) in enumerate(pairwise(shown), 2):
            count = min(len(first.given), len(second.given))
            begin = first.given[:count]
            if count >= 4 and not is_sequential(begin):
                seen.append((number, begin, begin == second.given[:count]))
    sampler = str(loaders[0].facts.get("sampler"))
    if len({same for *_, same in seen}) == 1:
        number, begin, same = seen[0]
        if not same:
            yield Right(f"epoch {number} has a different order from epoch {number - 1}")
        elif "Distributed" in sampler or sampler == "RandomSampler":
            yield found(
                "same-order",
                epoch=number,
                count=len(begin),
                rank=loaders[0].rank,
                samples=_listed(begin),
            )
        else:
            yield Unknown(
                f"whether the order is meant to be the same in every epoch: {sampler} gives the "
                f"same first {len(begin)} samples again"
            )
    if loaders[0].facts.get("replicas") and max(len(one.epochs) for one in loaders) == 1:
        yield Unknown("whether each epoch has another order: one epoch was seen")


def _batch_counts(recording: Recording, loaders: Loaders) -> Outcome | None:
    """Compare how many batches the ranks have in an epoch.

    Not a fault if the ranks stay in step where an epoch ends, since their loops then end alike or
    begin anew, or if Join lets those wait that have fewer.
    """
    batches = _common(loaders, "batches")
    if batches is not None:
        return Right(f"every rank has {batches:,} batches in an epoch")
    counts = {one.rank: one.facts["batches"] for one in loaders}
    if None in counts.values():
        return None
    listed = _by_rank(counts)
    if any(one.by_kind["join"] for one in recording.ranks):
        return Right(f"Join lets the ranks with fewer batches wait ({listed})")
    taken = [
        [
            record["epoch"]
            for record in takewhile(lambda record: record["k"] != "cut", one.records.records)
            if record["k"] == "batch" and record["l"] == one.facts["l"]
        ]
        for one in loaders
    ]
    cut = any(one.by_kind["cut"] for one in recording.ranks)
    ends = not cut or any(len(set(epochs)) > 1 for epochs in taken)
    if ends and not recording.hung and len(set(map(len, taken))) == 1:
        return Unknown(
            f"whether the ranks' different numbers of batches matter ({listed}): they "
            "stay in step where an epoch ends"
        )
    kind = "ends" if ends else "not seen"
    return found("different-batch-counts", kind=kind, sure=ends, counts=listed)
