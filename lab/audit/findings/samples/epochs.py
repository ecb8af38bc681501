"""Which samples each rank trained on: the epochs of its training loaders.

``training_loaders`` returns the ranks' training loaders side by side. A sample has two indices: the
outer one, which the sampler draws, and the inner one, which reaches the innermost dataset. Subsets
and per-rank partitions make them differ.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from lab.audit.recording import RankRecords, Record, Recording

Index = Any
"""An index as a sampler draws it: mostly an int, but anything that can be a key."""


class Item(NamedTuple):
    """A sample as a rank fetched it: index in the innermost dataset, label and hash, or None."""

    inner: Index
    label: Hashable
    hash: Hashable


@dataclass(frozen=True)
class Epoch:
    """One iteration of a rank over a loader.

    Parameters
    ----------
    batches : outer indices of each batch that the script was given.
    indices : outer indices of the whole epoch, also of what was left when the run was cut; None if
        they are not all known.
    left : the script left it early: neither the loader nor the cut ended it.
    """

    batches: tuple[tuple[Index, ...], ...]
    indices: tuple[Index, ...] | None
    left: bool = False


@dataclass(frozen=True)
class TrainingLoader:
    """A loader that a rank trained with.

    Parameters
    ----------
    facts : its record ``loader``.
    epochs : those in which the rank trained, in order. A look at a batch beforehand is none.
    items : by outer index: the samples that were fetched.
    inner_of : by outer index: the inner index, as far as it is known.
    """

    rank: int
    facts: Record
    epochs: list[Epoch]
    items: dict[Index, Item]
    inner_of: dict[Index, Index]

    def inner(self, outer: Sequence[Index]) -> list[Index] | None:
        """Return the inner indices of outer ones; None if the rule is not known.

        What was not fetched follows from what was, if inner = a * outer + b holds there: a = 1 and
        b = 0 without a subset, else a range.
        """
        if all(one in self.inner_of for one in outer):
            return [self.inner_of[one] for one in outer]
        rule = _line(self.inner_of)
        if rule is None or not all(isinstance(one, int) for one in outer):
            return None
        slope, start = rule
        return [slope * one + start for one in outer]


def _line(pairs: dict[Index, Index]) -> tuple[int, int] | None:
    """Return a, b of y = a * x + b if at least 8 pairs fulfil it, all of them; else None."""
    if len(pairs) < 8 or not all(isinstance(n, int) for pair in pairs.items() for n in pair):
        return None
    points = sorted(pairs.items())
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope, remainder = divmod(y1 - y0, x1 - x0)
    if remainder or slope == 0 or any(y != y0 + slope * (x - x0) for x, y in points):
        return None
    return slope, y0 - slope * x0


def training_loaders(recording: Recording) -> list[list[TrainingLoader]]:
    """Return the training loaders, those of all ranks that belong together in one list, by rank.

    The n-th training loader of each rank belongs to the n-th of the others. Ranks without any are
    left out, as a parameter server is; with other numbers of loaders nothing is returned.
    """
    found = [loaders for one in recording.ranks if (loaders := _loaders_of(one))]
    if len(found) < 2 or len({len(loaders) for loaders in found}) > 1:
        return []
    groups = [list(group) for group in zip(*found, strict=True)]
    return [one for one in groups if len({loader.facts.get("dataset") for loader in one}) == 1]


def _loaders_of(rank: RankRecords) -> list[TrainingLoader]:
    """Return the loaders whose batch was the last one before some backward of this rank."""
    batches: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)
    trained = trained_epochs(rank)
    for record in rank.by_kind["batch"]:
        batches[record["l"], record["epoch"]][record["b"]] = record
    facts = {record["l"]: record for record in rank.of("loader")}
    loaders = []
    for number in sorted({one for one, _ in trained if one in facts}):
        epochs = [
            _epoch(rank, facts[number], epoch, batches[number, epoch])
            for one, epoch in sorted(trained)
            if one == number
        ]
        items, inner_of = _items(rank, number)
        loaders.append(TrainingLoader(rank.rank, facts[number], epochs, items, inner_of))
    return loaders


def trained_epochs(rank: RankRecords) -> set[tuple[int, int]]:
    """Return (loader, epoch) of the batches that were the last ones before a backward pass.

    Where the probe has recorded in which epochs the optimiser stepped, only these count.
    """
    found, latest = set(), None
    for record in rank.records:
        if record["k"] == "batch":
            latest = (record["l"], record["epoch"])
        elif record["k"] == "backward" and latest is not None:
            found.add(latest)
    stepped = {(one["l"], one["epoch"]) for one in rank.by_kind["trained"]}
    return found & stepped if stepped else found


def _epoch(rank: RankRecords, facts: Record, epoch: int, records: dict[int, Record]) -> Epoch:
    """Return an epoch. It is whole if it ended uncut with all batches, or its rest is known."""
    rows = [records[b].get("indices") for b in sorted(records)]
    batches = tuple(tuple(map(_key, row)) for row in rows if row is not None)
    key = (facts["l"], epoch)
    ends = [one for one in rank.by_kind["epoch"] if (one["l"], one["epoch"]) == key]
    rests = [one for one in rank.by_kind["rest"] if (one["l"], one["epoch"]) == key]
    rest = [_key(one) for record in rests for one in record["indices"] or []]
    everything = tuple(one for batch in batches for one in batch) + tuple(rest)
    count = facts.get("batches") or 0
    size = facts.get("batch_size") or max(map(len, batches), default=0)
    whole = len(batches) == len(rows) and sorted(records) == list(range(len(records)))
    if rests:
        # Batches that were prefetched, but neither given nor left, would be missing here.
        whole &= count * size > 0 and len(everything) > (count - 1) * size
    else:
        whole &= any(not one["cut"] for one in ends) and count in (0, len(batches))
    return Epoch(batches, everything if whole and everything else None, left=not ends)


def _items(rank: RankRecords, number: int) -> tuple[dict[Index, Item], dict[Index, Index]]:
    """Return what was fetched, and the inner index of each outer one.

    The outer index stands for the inner one if these are no names: one sample has several, or
    several samples share one.
    """
    items: dict[Index, Item] = {}
    inner_of: dict[Index, Index] = {}
    names = True
    for record in rank.of("items"):
        if record["l"] != number:
            continue
        for outer, inner, label, digest in map(_key, record["rows"]):
            names &= inner is not None and inner_of.setdefault(outer, inner) == inner
            items[outer] = Item(inner, label, digest)
    for record in rank.of("rest"):
        if record["l"] == number and record.get("inner"):
            inner_of |= dict(
                zip(map(_key, record["indices"]), map(_key, record["inner"]), strict=False)
            )
    if not names or max(Counter(inner_of.values()).values(), default=1) > 1:
        return {k: one._replace(inner=k) for k, one in items.items()}, {k: k for k in items}
    return items, inner_of


def _key(value: Any) -> Any:
    """Return what JSON gave as something that can be a key: lists as tuples."""
    return tuple(map(_key, value)) if isinstance(value, list) else value


def same_data(one: TrainingLoader, other: TrainingLoader) -> bool | None:
    """Return whether equal inner indices mean equal samples on two ranks; None if unknown.

    Equal labels or equal values tell. Augmentation changes the values, so unequal ones tell
    nothing; labels in a regular order would agree by themselves, so they tell nothing either.
    """
    mine = {item.inner: item for item in one.items.values()}
    theirs = {item.inner: item for item in other.items.values()}
    both = [(mine[inner], theirs[inner]) for inner in mine if inner in theirs]
    labelled = [(a, b) for a, b in both if a.label is not None and b.label is not None]
    if any(a.label != b.label for a, b in labelled):
        return False
    hashes = [a.hash for a, b in both if a.hash is not None and a.hash == b.hash]
    if len(set(hashes)) >= 2 and len(hashes) >= len(both) / 10:
        return True
    if len(labelled) >= 16 and not _is_regular([(a.inner, a.label) for a, _ in labelled[:200]]):
        return True
    return None


def _is_regular(labels: Sequence[tuple[Index, Hashable]]) -> bool:
    """Return whether labels follow from the index, or are too few different ones to tell.

    Sorted labels, such as those of a folder of classes, and repeated ones, such as i % 10.
    """
    counts = Counter(label for _, label in labels)
    alike = sum((count / len(labels)) ** 2 for count in counts.values())
    if alike ** len(labels) > 1e-6 or not all(isinstance(index, int) for index, _ in labels):
        return True
    ordered = sorted(dict(labels).items())
    equal = sum(a == b for (_, a), (_, b) in pairwise(ordered))
    if equal > (alike + 1) / 2 * len(ordered):
        return True
    enough = math.ceil(math.log(1e-6) / math.log(alike))
    periods = {*range(1, len(ordered) - enough + 1), *_number_of_classes(counts)}
    return any(_has_period(ordered, one, enough) for one in periods)


def _has_period(labels: Sequence[tuple[Index, Hashable]], period: int, enough: int) -> bool:
    """Return whether labels repeat in a period that at least ``enough`` samples confirm."""
    places = {index % period for index, _ in labels}
    return (
        len({(index % period, label) for index, label in labels}) == len(places)
        and len(labels) - len(places) >= enough
    )


def _number_of_classes(labels: Iterable[Hashable]) -> list[int]:
    numbers = [label for label in labels if isinstance(label, int)]
    return [max(numbers) + 1] if numbers and min(numbers) >= 0 else []


def is_sequential(indices: Sequence[Index]) -> bool:
    """Return whether indices ascend in equal strides, as they do without shuffling."""
    numbers = [one for one in indices if isinstance(one, int)]
    strides = {b - a for a, b in pairwise(numbers)}
    return len(numbers) == len(indices) and len(strides) == 1 and min(strides) > 0
