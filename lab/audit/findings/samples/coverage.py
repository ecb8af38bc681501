"""Whether the ranks together see each sample once in an epoch.

Samples that no rank sees are a fault only if something shows that they were meant to be seen: a
subset, a validation split or a limit leaves samples out on purpose.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.samples.epochs import (
    Index,
    TrainingLoader,
    is_sequential,
    same_data,
)


@dataclass(frozen=True)
class Coverage:
    """The samples of one whole epoch.

    Parameters
    ----------
    shares : of each rank: inner indices in the order in which they are drawn.
    length : of the dataset that the ranks share; None if it is not known.
    local_batch : the most samples of a rank's first batch.
    replicas : the number of ranks that DistributedSampler was told; None without it.
    """

    epoch: int
    shares: list[list[Index]]
    length: int | None
    local_batch: int
    replicas: int | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.shares)

    @cached_property
    def counts(self) -> Counter[Index]:
        """How often each sample is drawn by all ranks together."""
        return Counter(index for share in self.shares for index in share)

    @property
    def repeats(self) -> int:
        """How many of the drawn samples had been drawn already."""
        return self.counts.total() - len(self.counts)

    @property
    def missing(self) -> int | None:
        """How many samples of the dataset no rank draws."""
        return None if self.length is None else max(0, self.length - len(self.counts))

    @cached_property
    def ranges(self) -> list[range]:
        """The shares as ranges in order of their starts; empty if one of them is no range."""
        if not all(isinstance(index, int) for index in self.counts):
            return []
        shares = [sorted(set(share)) for share in self.shares]
        if not all(is_sequential(share) for share in shares):
            return []
        found = [range(share[0], share[-1] + 1, share[1] - share[0]) for share in shares]
        return sorted(found, key=lambda one: one.start)

    @property
    def tolerance(self) -> int:
        """How many samples may come twice so that all ranks have equally many.

        DistributedSampler and ranges need fewer than one a rank; others may fill up a batch.
        """
        small = self.replicas is not None or self.ranges
        return self.size if small else self.size * max(self.local_batch, 1)


def coverage(loaders: Sequence[TrainingLoader], ranks: int) -> Iterator[Outcome]:
    """Check the first epoch whose samples are known on all ranks that have a loader."""
    data = [same_data(one, other) for one, other in combinations(loaders, 2)]
    if False in data:
        return
    one_dataset = all(data) or all(
        one.facts.get("replicas") == len(loaders)
        and one.facts.get("length") == loaders[0].facts.get("length")
        for one in loaders
    )
    whole = next(whole_epochs(loaders), None)
    if (replicas := _common(loaders, "replicas") or 0) > ranks:
        length = _common(loaders, "length") or 0
        missing = length - -(-length // replicas) * ranks
        text = f"no rank draws {missing:,} of {length:,} samples: the sampler shares them out to "
        yield Finding("uneven-coverage", (f"{text}{replicas} ranks, but there are {ranks}",))
    elif whole is None:
        yield from _seen_so_far(loaders)
    elif whole.repeats > whole.tolerance:
        yield from _check_repeats(whole, one_dataset)
    elif (fault := _left_out(whole)) is not None:
        yield Finding("uneven-coverage", (f"epoch {whole.epoch + 1}: {fault}",))
    elif whole.missing is None:
        yield Right("no sample comes twice in an epoch")
    elif whole.missing > whole.size * max(whole.local_batch, 1):
        yield Unknown(
            f"whether {whole.missing:,} of {whole.length:,} samples are left out of each epoch on "
            "purpose"
        )
    else:
        padded = f", {whole.repeats:,} padded" if whole.repeats else ""
        left = f", {whole.missing:,} left over" if whole.missing else ""
        yield Right(f"each epoch covers the dataset once ({whole.length:,} samples{padded}{left})")


def whole_epochs(loaders: Sequence[TrainingLoader]) -> Iterator[Coverage]:
    """Yield the epochs whose inner indices are all known on all ranks."""
    for number, epochs in enumerate(zip(*(one.epochs for one in loaders), strict=False)):
        outer = [one.indices for one in epochs]
        shares = [
            one.inner(indices) for one, indices in zip(loaders, outer, strict=True) if indices
        ]
        known = [share for share in shares if share is not None]
        if len(known) < len(loaders):
            continue
        plain = all(
            share == list(indices or ()) for share, indices in zip(known, outer, strict=True)
        )
        batches = [one.batches for one in epochs]
        yield Coverage(
            epoch=number,
            shares=known,
            length=_common(loaders, "length" if plain else "inner_length"),
            local_batch=max((len(one[0]) for one in batches if one), default=0),
            replicas=_common(loaders, "replicas"),
        )


def _common(loaders: Sequence[TrainingLoader], name: str) -> int | None:
    """Return a number that all ranks' loaders have in common, else None."""
    values = {one.facts.get(name) for one in loaders}
    return values.pop() if len(values) == 1 else None


def _check_repeats(whole: Coverage, one_dataset: bool) -> Iterator[Outcome]:
    """Say that samples come twice, unless a sampler draws them so on each rank by itself."""
    own = max(len(share) - len(set(share)) for share in whole.shares)
    if own > max(whole.size, whole.local_batch):
        yield Unknown("the coverage of the dataset: the sampler draws samples repeatedly on a rank")
    elif not one_dataset:
        yield Unknown(
            "the coverage of the dataset: the ranks draw the same indices, but the "
            "audit cannot tell whether these belong to the same data"
        )
    else:
        several = sum(count > 1 for count in whole.counts.values())
        text = f"epoch {whole.epoch + 1}: {several:,} samples are drawn more than once"
        if several == len(whole.counts):
            text = f"epoch {whole.epoch + 1}: every rank draws the same {several:,} samples"
        if whole.missing:
            text += f", {whole.missing:,} of {whole.length:,} are drawn by no rank"
        yield Finding("uneven-coverage", (text,))


def _left_out(whole: Coverage) -> str | None:
    """Return what shows that samples are left out by mistake, or None."""
    starts = [one.start for one in whole.ranges]
    steps = {one.step for one in whole.ranges}
    if steps == {1}:
        gaps = [
            range(one.stop, other.start)
            for one, other in zip(whole.ranges, whole.ranges[1:], strict=False)
            if other.start - one.stop > max(whole.local_batch, whole.size)
        ]
        if gaps:
            listed = ", ".join(f"{gap.start:,} to {gap.stop - 1:,}" for gap in gaps[:3])
            return f"no rank draws samples {listed}, which lie between the ranks' parts"
    consecutive = starts == list(range(starts[0], starts[0] + whole.size)) if starts else False
    if len(steps) == 1 and max(steps) > whole.size and consecutive:
        return f"every rank draws one sample in {max(steps)}, but there are {whole.size} ranks"
    return None


def _seen_so_far(loaders: Sequence[TrainingLoader]) -> Iterator[Outcome]:
    """Check the batches alone: random draws of several ranks from one dataset meet sooner or later.

    By chance, or by padding, a few samples may come twice.
    """
    for number, epochs in enumerate(zip(*(one.epochs for one in loaders), strict=False)):
        shares, part = [], 0.0
        for one, epoch in zip(loaders, epochs, strict=True):
            outer = [index for batch in epoch.batches for index in batch]
            inner = one.inner(outer)
            if not inner or len(set(inner)) < len(inner):
                return
            shares.append(inner)
            part = max(part, len(inner) / max(one.facts.get("length") or 1, 1))
        twice = {i for i, count in Counter(i for s in shares for i in s).items() if count > 1}
        batch = max((len(b) for epoch in epochs for b in epoch.batches), default=0)
        known = all(
            same_data(one, other)
            for (one, mine), (other, theirs) in combinations(
                list(zip(loaders, shares, strict=True)), 2
            )
            if twice & set(mine) & set(theirs)
        )
        if known and len(twice) > max(len(loaders), 3, len(loaders) * batch * min(part, 1) ** 2):
            drawn = sum(map(len, shares))
            text = f"epoch {number + 1}: {len(twice):,} of the first {drawn:,} samples drawn are "
            yield Finding("uneven-coverage", (text + "drawn by several ranks",))
            return
    yield Unknown("the coverage of the dataset: the samples of a whole epoch are not known")
