"""What each rank drew and did: the epochs of its training loaders, and its steps.

``training_loaders`` returns the ranks' training loaders side by side. Samples are named by their
index in the innermost dataset, see probe/data.py; ``same_data`` says whether one index is one
sample on two ranks.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise, zip_longest
from statistics import mode
from typing import Any, NamedTuple

from lab.audit.recording import RankRecords, Record, Recording

Index = Any  # as a sampler draws it: mostly an int, but anything that can be a key


class Epoch(NamedTuple):
    """One iteration of a rank over a loader.

    batches : the records of those that the script was given and whose indices are known. Outer
        indices, ``indices``, stand for innermost ones, ``inner``, that are not known.
    given : their outer indices.
    whole : these records and that of what was left when the run was cut; empty if that is not all
        known.
    left : the script left it early: neither the loader nor the cut ended it.
    """

    batches: list[Record]
    given: list[Index]
    whole: list[Record]
    left: bool


@dataclass(frozen=True)
class TrainingLoader:
    """A loader that a rank trained with.

    Parameters
    ----------
    records : all records of the rank.
    facts : its record ``loader``.
    epochs : those in which the rank trained, in order. A look at a batch beforehand is none.
    """

    rank: int
    records: RankRecords
    facts: Record
    epochs: list[Epoch]

    @property
    def drawn(self) -> dict[tuple[int, int, Index], Hashable]:
        """Hashes of the samples as the script was given them, None where that is not known.

        They are found by epoch, batch (both from 1) and innermost index.
        """
        return {
            (number, b, index): content
            for number, epoch in enumerate(self.epochs, 1)
            for b, batch in enumerate(epoch.batches, 1)
            for index, content in zip_longest(batch["inner"], batch.get("contents") or ())
        }


def training_loaders(recording: Recording) -> list[list[TrainingLoader]]:
    """Return the training loaders, those of all ranks that belong together in one list, by rank.

    The n-th training loader of each rank belongs to the n-th of the others. Ranks without any are
    left out, as a parameter server is; with other numbers of loaders nothing is returned.
    """
    found = [loaders for one in recording.ranks if (loaders := _loaders_of(one))]
    if len(found) < 2 or len(set(map(len, found))) > 1:
        return []
    groups = [list(group) for group in zip(*found, strict=True)]
    return [one for one in groups if len({loader.facts.get("dataset") for loader in one}) == 1]


def _loaders_of(rank: RankRecords) -> list[TrainingLoader]:
    trained = sorted(_trained_epochs(rank))
    loaders = [
        TrainingLoader(
            rank.rank, rank, facts, [_epoch(rank, at) for at in trained if at[0] == facts["l"]]
        )
        for facts in rank.by_kind["loader"]
    ]
    return [one for one in loaders if one.epochs]


def _trained_epochs(rank: RankRecords) -> set[tuple[int, int]]:
    """Return (loader, epoch) of the batches that were the last ones before a backward pass.

    Where the probe has recorded in which epochs the optimiser stepped, only these count.
    """
    events = [one for one in rank.records if one["k"] in ("batch", "backward")]
    last = {
        (one["l"], one["epoch"])
        for one, following in pairwise(events)
        if one["k"] == "batch" and following["k"] == "backward"
    }
    stepped = {(one["l"], one["epoch"]) for one in rank.by_kind["trained"]}
    return last & stepped if stepped else last


def _epoch(rank: RankRecords, at: tuple[int, int]) -> Epoch:
    """Return an epoch. It is whole if it ended uncut with all batches, or its rest is known."""
    kinds = ("batch", "epoch", "rest")
    records = [one for one in rank.records if one["k"] in kinds and (one["l"], one["epoch"]) == at]
    draws = [
        one | {"inner": one.get("inner") or one["indices"]} for one in records if one.get("indices")
    ]
    batches = [one for one in draws if one["k"] == "batch"]
    given = [index for one in batches for index in one["indices"]]
    known = all(one.get("indices", ()) is not None for one in records)
    left = records[-1]["k"] == "batch"
    whole = known and not left and not records[-1].get("cut")
    return Epoch(batches, given, draws if whole else [], left)


def same_data(one: TrainingLoader, other: TrainingLoader) -> bool | None:
    """Return whether equal inner indices mean equal samples on two ranks; None if unknown.

    Equal values tell, unless many samples are equal by themselves. Augmentation changes them, so
    unequal ones tell nothing; what the datasets hold does.
    """
    mine, theirs = (
        {index: content for (*_, index), content in loader.drawn.items()} for loader in (one, other)
    )
    both = mine.keys() & theirs.keys()
    equal = {content for _, content in mine.items() & theirs.items()} - {None}
    varied = 2 * len({mine[index] for index in both}) > len(both)
    if varied and len(equal) >= max(2, len(both) / 10):
        return True
    held = [loader.facts.get("content") for loader in (one, other)]
    return None if None in held else held[0] == held[1]


def is_sequential(indices: Sequence[Index]) -> bool:
    """Return whether indices ascend in equal strides, as they do without shuffling."""
    numbers = set(map(type, indices)) == {int}
    strides = {b - a for a, b in pairwise(indices)} if numbers else {0}
    return len(strides) == 1 and min(strides) > 0


class TrainingStep:
    """What a rank did for one update of its first optimiser.

    Attributes
    ----------
    backwards : the records ``backward``.
    scale : GradScaler's, by which the loss is multiplied; 1 without.
    batches : how many its training loaders gave.
    accumulates : each of several batches has its own backward pass.
    exchanged : the batches, counted from 1 in this step, during which gradients were exchanged by
        hand; those of DDP are not seen.
    samples : those that the losses are computed of, by the model's inputs; else those that its
        loaders gave; 0 if not known. A loss that has another number, or with a loader none, says
        that the inputs do not tell; so do several losses a batch.
    takes_a_part : the model gets fewer samples than the loader gave, as when ranks slice a batch.
        Inputs may have another dimension first, so a loss of the whole batch says no.
    """

    def __init__(self, records: Sequence[Record], trained: Collection[tuple[int, int]]) -> None:
        given = [one["k"] == "batch" and (one["l"], one["epoch"]) in trained for one in records]
        indices: list[Any] = [one.get("indices") for one in compress(records, given)]
        self.backwards = [one for one in records if one["k"] == "backward"]
        self.scale = records[-1].get("scale") or 1.0
        self.batches = sum(given)
        self.accumulates = self.batches == len(self.backwards) > 1
        self.exchanged = {
            batch
            for one, batch in zip(records, accumulate(given), strict=True)
            if one["k"] == "call" and one.get("content") == "gradient"
        }
        loaded = 0 if None in indices else sum(map(len, indices))
        inputs = sum(one["forwards"][0][0] or 0 for one in self.backwards if one["forwards"])
        in_losses = sum((one["loss"] or {}).get("samples") or 0 for one in self.backwards)
        told = (
            in_losses in ([inputs] if self.batches else [inputs, 0])
            and all(len(one["forwards"]) == 1 for one in self.backwards)
            and not 0 < self.batches < len(self.backwards)
        )
        self.samples = inputs if told and inputs else loaded
        self.takes_a_part = 0 < inputs < 0.9 * loaded and in_losses != loaded


def training_steps(rank: RankRecords) -> list[TrainingStep]:
    """Return a rank's steps in order."""
    trained = _trained_epochs(rank)
    first = min((one["o"] for one in rank.by_kind["step"]), default=None)
    ends = [i for i, one in enumerate(rank.records, 1) if one["k"] == "step" and one["o"] == first]
    return [TrainingStep(rank.records[begin:end], trained) for begin, end in pairwise([0, *ends])]


def local_batches(recording: Recording) -> dict[int, int] | None:
    """Return the samples that each rank has in most of its steps; None if a rank's are unknown.

    The last step of an epoch may have fewer, and a loader may be a batch ahead.
    """
    sizes = {}
    for rank in recording.ranks:
        counts = [step.samples for step in training_steps(rank)] or [0]
        most = mode(counts)
        if 2 * counts.count(most) >= len(counts):
            sizes[rank.rank] = most
    return sizes if len(sizes) == recording.size and all(sizes.values()) else None
