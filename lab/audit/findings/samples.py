"""Findings about samples: which ones each rank trains on, in which order, and how many.

Samples are compared by their innermost index, per loader and within one epoch. Equal indices are
equal samples only if the ranks hold the same data, see ``epochs.same_data``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, takewhile
from math import gcd
from typing import Any, NamedTuple

from lab.audit.findings.epochs import (
    Index,
    TrainingLoader,
    is_sequential,
    local_batches,
    same_data,
    training_loaders,
    training_steps,
)
from lab.audit.findings.finding import Outcome, Right, Unknown, found
from lab.audit.recording import RankRecords, Recording

Loaders = Sequence[TrainingLoader]
_MANY = 4
"""From this many epochs that all end early, the script takes one batch of each: compare them."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is found about the samples of a run."""
    yield from _global_batch(recording)
    if len(recording.ranks) < 2:
        return
    groups = training_loaders(recording)
    for loaders in groups:
        if _computes_parts(recording):
            yield Unknown("the samples: the ranks compute on other samples than their loaders give")
            continue
        pairs = [_pair(recording, one, other) for one, other in combinations(loaders, 2)]
        same = [outcome for pair in pairs if (outcome := _same_samples(pair)) is not None]
        yield from same
        if all(pair.differ for pair in pairs):
            yield Right("every rank trains on different samples")
        if not same and not any(pair.data is False for pair in pairs):
            one_dataset = all(pair.data for pair in pairs)
            yield from _coverage(recording, loaders, one_dataset=one_dataset)
        yield from _same_order(loaders)
        yield from _batch_counts(recording, loaders)
        yield from _padding(loaders)
    if not any(epoch.batches for group in groups for one in group for epoch in one.epochs):
        yield from _same_inputs(recording)


def _global_batch(recording: Recording) -> Iterator[Outcome]:
    """Compare the samples of a step on all ranks with what was asked for.

    A local batch may be rounded either way, in each micro-batch.
    """
    asked, local = recording.global_batch, local_batches(recording)
    if asked is None:
        return
    if local is None:
        yield Unknown("the global batch: the samples of a step are not known on every rank")
        return
    total = sum(local.values())
    micro = max((len(s.backwards) for r in recording.ranks for s in training_steps(r)), default=1)
    if abs(total - asked) < recording.size * max(micro, 1):
        yield Right(f"the global batch is {total:,} samples, as asked for")
    else:
        yield found("wrong-global-batch", total=total, asked=asked, counts=_by_rank(local))


def _by_rank(counts: dict[int, Any]) -> str:
    return ", ".join(f"rank {rank} has {count:,}" for rank, count in sorted(counts.items()))


def _computes_parts(recording: Recording) -> bool:
    """Return whether a rank trains on parts of its batches in most steps."""
    parts = [[step.takes_a_part for step in training_steps(rank)] for rank in recording.ranks]
    return any(sum(steps) * 2 > len(steps) for steps in parts)


class Pair(NamedTuple):
    """Two ranks' batches of the same number in the same epoch.

    common : (epoch, batch, samples that both ranks have, their share of the smaller batch).
    data : whether equal indices are equal samples; None if unknown.
    """

    ranks: str
    common: list[tuple[int, int, list[Index], float]]
    data: bool | None

    @property
    def differ(self) -> bool:
        """Whether no sample of a batch is in the other rank's."""
        return bool(self.common) and (self.data is False or not any(row[2] for row in self.common))


def _pair(recording: Recording, one: TrainingLoader, other: TrainingLoader) -> Pair:
    """Compare two ranks. Equal batches whose targets never agree are not the same samples."""
    common = []
    for epoch, (mine, theirs) in enumerate(zip(one.epochs, other.epochs, strict=False), 1):
        for batch, draws in enumerate(zip(mine.batches, theirs.batches, strict=False), 1):
            a, b = (set(draw.inner) for draw in draws)
            if a and b:
                common.append((epoch, batch, list(a & b), len(a & b) / min(len(a), len(b))))
    data = same_data(one, other)
    inputs = [_inputs(rank) for rank in recording.ranks if rank.rank in (one.rank, other.rank)]
    targets = [(inputs[0][key][1], inputs[1][key][1]) for key in inputs[0] if key in inputs[1]]
    known = [a == b for a, b in targets if a is not None and b is not None]
    if known and not any(known) and any(row[3] >= 0.9 for row in common):
        data = None if data else False
    return Pair(f"ranks {one.rank} and {other.rank}", common, data)


def _same_samples(pair: Pair) -> Outcome | None:
    """Return what it means that two ranks draw the same indices; None if they do not."""
    same = [row for row in pair.common if row[3] >= 0.9]
    if pair.data is False or not same or len(same) < 0.9 * len(pair.common):
        return None
    if pair.data is None:
        return Unknown(
            f"whether {pair.ranks} train on the same samples: their indices are equal, but "
            "the audit cannot tell whether they index the same data"
        )
    epoch, batch, samples, _ = same[0]
    return found(
        "same-samples",
        kind="indices",
        ranks=pair.ranks,
        epoch=epoch,
        batch=batch,
        count=len(samples),
        samples=", ".join(map(str, samples[:4])),
        batches=len(same),
    )


def _inputs(rank: RankRecords) -> dict[tuple[int, int], tuple[object, object]]:
    """Return the hashes of inputs and target by (step, number of the backward)."""
    return {
        (one["step"], one["micro"]): (
            tuple(forward[1] for forward in one["forwards"]),
            (one["loss"] or {}).get("target_hash"),
        )
        for one in rank.by_kind["backward"]
        if one["forwards"] and all(forward[1] is not None for forward in one["forwards"])
    }


def _same_inputs(recording: Recording) -> Iterator[Outcome]:
    """Without indices: compare the ranks' inputs and targets, backward by backward.

    Inputs that never change may be anything, so then equal targets must be known. A model that is
    sharded may rightly compute one sample on several ranks.
    """
    sharded = any(one.by_kind["fsdp"] for one in recording.ranks)
    first, *others = recording.ranks
    mine = _inputs(first)
    for other in () if sharded else others:
        theirs = _inputs(other)
        both = [(mine[key], theirs[key]) for key in mine if key in theirs]
        telling = len({a[0] for a, _ in both}) > 1 or all(a[1] is not None for a, _ in both)
        if len(both) >= 2 and telling and all(a == b for a, b in both):
            ranks = f"ranks {first.rank} and {other.rank}"
            yield found("same-samples", kind="inputs", ranks=ranks, count=len(both))
            return
    yield Unknown("which samples each rank trains on: no DataLoader draws them by index")


@dataclass(frozen=True)
class Coverage:
    """The samples of one epoch.

    Parameters
    ----------
    shares : of each rank: inner indices in the order in which they are drawn.
    length : of the dataset that the ranks share; None if it is not known.
    local_batch : the most samples of a rank's first batch.
    whole : also what would have been given after the cut is known.
    """

    epoch: int
    shares: list[list[Index]]
    length: int | None
    local_batch: int
    whole: bool

    @cached_property
    def counts(self) -> Counter[Index]:
        """How often each sample is drawn by all ranks together."""
        return Counter(index for share in self.shares for index in share)

    @cached_property
    def in_strides(self) -> bool:
        """Whether each share is a range of the samples, in any order."""
        numbers = all(isinstance(index, int) for index in self.counts)
        return numbers and all(is_sequential(sorted(set(share))) for share in self.shares)

    @property
    def repeats(self) -> int:
        """How many of the drawn samples had been drawn already."""
        return self.counts.total() - len(self.counts)

    @property
    def tolerance(self) -> float:
        """How many samples may come twice so that all ranks have equally many.

        Ranges need fewer than one a rank; others may fill up a batch. Of the first batches some may
        come twice by chance.
        """
        rounding = len(self.shares) * (1 if self.in_strides else self.local_batch)
        return rounding if self.whole else max(rounding, self.counts.total() / 10)

    @property
    def holes(self) -> list[int]:
        """The samples that are left out between the first and the last, if shares are ranges."""
        drawn = sorted(self.counts) if self.in_strides else []
        if not drawn or drawn[-1] >= (self.length or 0):  # those of several datasets
            return []
        stride = gcd(*(b - a for a, b in pairwise(drawn)))
        return sorted(set(range(drawn[0], drawn[-1], stride)) - set(drawn))


def _epochs(loaders: Loaders, *, whole: bool) -> list[Coverage]:
    """Return the epochs whose inner indices are all known on all ranks."""
    known = []
    for number, epochs in enumerate(zip(*(one.epochs for one in loaders), strict=False), 1):
        draws = [epoch.whole if whole else epoch.batches for epoch in epochs]
        shares = [[index for draw in one for index in draw.inner] for one in draws]
        same = all(draw.inner == draw.outer for one in draws for draw in one)
        length = _common(loaders, "length" if same else "inner_length")
        local_batch = max((len(one.batches[0].outer) for one in epochs if one.batches), default=1)
        if all(shares):
            known.append(Coverage(number, shares, length, local_batch, whole))
    return known


def _common(loaders: Loaders, name: str) -> int | None:
    """Return a number that all ranks' loaders have in common, else None."""
    values = {one.facts.get(name) for one in loaders}
    return values.pop() if len(values) == 1 else None


def _coverage(recording: Recording, loaders: Loaders, *, one_dataset: bool) -> Iterator[Outcome]:
    """Check whether the ranks together see each sample once in an epoch."""
    length, replicas = _common(loaders, "length") or 0, _common(loaders, "replicas") or 0
    whole = _epochs(loaders, whole=True)
    epochs = whole or _epochs(loaders, whole=False)
    repeated = [one for one in epochs if one.repeats > one.tolerance]
    if replicas > recording.size:
        yield found(
            "uneven-coverage",
            kind="replicas",
            missing=length - -(-length // replicas) * recording.size,
            length=length,
            replicas=replicas,
            ranks=recording.size,
        )
    elif repeated:
        yield _repeats(repeated[0], one_dataset=one_dataset)
    elif whole:
        yield _left_out(whole[0])
    elif epochs:
        yield Unknown("the coverage of the dataset: the samples of a whole epoch are not known")


def _repeats(epoch: Coverage, *, one_dataset: bool) -> Outcome:
    """Say that samples come twice, unless a sampler draws them so on each rank by itself."""
    own = max(len(share) - len(set(share)) for share in epoch.shares)
    if own > (max(len(epoch.shares), epoch.local_batch) if epoch.whole else 0):
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
        epoch=epoch.epoch,
        different=len(epoch.counts),
        several=sum(count > 1 for count in epoch.counts.values()),
    )


def _left_out(epoch: Coverage) -> Outcome:
    """Say whether samples are left out of an epoch in which none comes twice.

    That is a fault only if something shows that they were meant to be seen: a subset, a validation
    split or a limit leaves samples out on purpose.
    """
    if len(epoch.holes) > max(epoch.local_batch, len(epoch.shares)):
        return found(
            "uneven-coverage",
            kind="holes",
            epoch=epoch.epoch,
            count=len(epoch.holes),
            first=", ".join(map(str, epoch.holes[:3])),
        )
    if epoch.length is None:
        return Right("no sample comes twice in an epoch")
    missing = max(0, epoch.length - len(epoch.counts))
    if missing > len(epoch.shares) * epoch.local_batch:
        return Unknown(
            f"whether {missing:,} of {epoch.length:,} samples are left out of each epoch on purpose"
        )
    padded = f", {epoch.repeats:,} padded" if epoch.repeats else ""
    left = f", {missing:,} left over" if missing else ""
    return Right(f"each epoch covers the dataset once ({epoch.length:,} samples{padded}{left})")


def _padding(loaders: Loaders) -> Iterator[Outcome]:
    """Say that DistributedSampler repeats samples, fewer than one a rank."""
    for epoch in _epochs(loaders, whole=True)[:1]:
        if _common(loaders, "replicas") == len(loaders) > epoch.repeats > 0:
            samples, draws = len(epoch.counts), epoch.counts.total()
            yield found("padding-sampler", samples=samples, draws=draws)


def _same_order(loaders: Loaders) -> Iterator[Outcome]:
    """Compare the first batches of each epoch with those of the epoch before.

    An epoch that the script left early, as to look at a batch, counts only if there is none else
    and they are many.
    """
    seen = []
    for one in loaders:
        kept = [epoch for epoch in one.epochs if not epoch.left]
        epochs = kept if len(kept) >= 2 or len(one.epochs) < _MANY else one.epochs
        for number, (first, second) in enumerate(pairwise(epochs), 2):
            both = list(zip(first.given, second.given, strict=False))
            begin = [index for index, _ in both]
            several = min(len(first.batches), len(second.batches)) >= 2 or epochs is not kept
            if several and len(begin) >= 4 and not is_sequential(begin):
                seen.append((number, begin, all(a == b for a, b in both)))
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
                samples=", ".join(map(str, begin[:4])),
            )
        else:
            yield Unknown(
                f"whether the order is meant to be the same in every epoch: {sampler} gives the "
                f"same first {len(begin)} samples again"
            )
    if loaders[0].facts.get("replicas") and max(len(one.epochs) for one in loaders) == 1:
        yield Unknown("whether each epoch has another order: one epoch was seen")


def _batch_counts(recording: Recording, loaders: Loaders) -> Iterator[Outcome]:
    """Compare how many batches the ranks have in an epoch.

    Not a fault if the ranks stay in step where an epoch ends, since their loops then end alike or
    begin anew, or if Join lets those wait that have fewer.
    """
    counts = {one.rank: one.facts.get("batches") for one in loaders}
    if None in counts.values():
        return
    if len(set(counts.values())) == 1:
        yield Right(f"every rank has {loaders[0].facts['batches']:,} batches in an epoch")
        return
    listed = _by_rank(counts)
    numbers = {one.rank: one.facts["l"] for one in loaders}
    taken = [
        [
            record["epoch"]
            for record in takewhile(lambda record: record["k"] != "cut", rank.records)
            if record["k"] == "batch" and record["l"] == numbers[rank.rank]
        ]
        for rank in recording.ranks
        if rank.rank in numbers
    ]
    cut = any(one.by_kind["cut"] for one in recording.ranks)
    ends = not cut or any(len(set(epochs)) > 1 for epochs in taken)
    if any(one.by_kind["join"] for one in recording.ranks):
        yield Right(f"Join lets the ranks with fewer batches wait ({listed})")
    elif ends and not recording.hung and len(set(map(len, taken))) == 1:
        yield Unknown(
            f"whether the ranks' different numbers of batches matter ({listed}): they "
            "stay in step where an epoch ends"
        )
    else:
        kind = "ends" if ends else "not seen"
        yield found("different-batch-counts", kind=kind, sure=ends, counts=listed)
