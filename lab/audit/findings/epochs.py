"""What each rank drew and did: the epochs of its training loaders, and its steps.

``training_loaders`` returns the ranks' training loaders side by side. Samples are named by their
index in the innermost dataset, see probe/data.py; ``same_data`` says whether one index is one
sample on two ranks.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from lab.audit.recording import RankRecords, Record, Recording

Index = Any
"""An index as a sampler draws it: mostly an int, but anything that can be a key."""


class Draw(NamedTuple):
    """The samples of a batch, or of the rest of an epoch.

    outer, inner : their indices as the sampler draws them, and the innermost ones.
    contents : hashes of them as the script was given them, where known.
    """

    outer: list[Index]
    inner: list[Index]
    contents: Sequence[Hashable]


@dataclass(frozen=True)
class Epoch:
    """One iteration of a rank over a loader.

    Parameters
    ----------
    batches : those that the script was given and whose indices are known.
    whole : these and what was left when the run was cut; empty if that is not all known.
    left : the script left it early: neither the loader nor the cut ended it.
    """

    batches: list[Draw]
    whole: list[Draw]
    left: bool

    @property
    def given(self) -> list[Index]:
        """The outer indices of the batches."""
        return [index for batch in self.batches for index in batch.outer]


@dataclass(frozen=True)
class TrainingLoader:
    """A loader that a rank trained with.

    Parameters
    ----------
    facts : its record ``loader``.
    epochs : those in which the rank trained, in order. A look at a batch beforehand is none.
    """

    rank: int
    facts: Record
    epochs: list[Epoch]

    @cached_property
    def contents(self) -> dict[Index, Hashable]:
        """The hashes of samples as the script was given them, by innermost index."""
        batches = [batch for epoch in self.epochs for batch in epoch.batches]
        return {
            index: content
            for one in batches
            for index, content in zip(one.inner, one.contents, strict=False)
        }


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
    trained = sorted(trained_epochs(rank))
    loaders = []
    for facts in rank.by_kind["loader"]:
        epochs = [_epoch(rank, number, epoch) for number, epoch in trained if number == facts["l"]]
        if epochs:
            loaders.append(TrainingLoader(rank.rank, facts, epochs))
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


def _draw(record: Record) -> Draw:
    """Return a record's indices; the outer ones stand for inner ones that are not known."""
    outer = record["indices"] or []
    return Draw(outer, record.get("inner") or outer, record.get("contents") or ())


def _epoch(rank: RankRecords, loader: int, epoch: int) -> Epoch:
    """Return an epoch. It is whole if it ended uncut with all batches, or its rest is known."""
    given, ends, rests = (
        [one for one in rank.by_kind[kind] if (one["l"], one["epoch"]) == (loader, epoch)]
        for kind in ("batch", "epoch", "rest")
    )
    known = all(one["indices"] is not None for one in [*given, *rests])
    whole = known and (rests or any(not one["cut"] for one in ends))
    return Epoch(
        [_draw(one) for one in given if one["indices"] is not None],
        [_draw(one) for one in [*given, *rests]] if whole else [],
        left=not ends,
    )


def same_data(one: TrainingLoader, other: TrainingLoader) -> bool | None:
    """Return whether equal inner indices mean equal samples on two ranks; None if unknown.

    Equal values tell, unless many samples are equal by themselves. Augmentation changes them, so
    unequal ones tell nothing; what the datasets hold does.
    """
    both = [index for index in one.contents if index in other.contents]
    equal = {one.contents[i] for i in both if one.contents[i] == other.contents[i]} - {None}
    varied = len({one.contents[i] for i in both}) * 2 > len(both)
    if varied and len(equal) >= max(2, len(both) / 10):
        return True
    held = [loader.facts.get("content") for loader in (one, other)]
    return None if None in held else held[0] == held[1]


def is_sequential(indices: Sequence[Index]) -> bool:
    """Return whether indices ascend in equal strides, as they do without shuffling."""
    numbers = [one for one in indices if isinstance(one, int)]
    strides = {b - a for a, b in pairwise(numbers)}
    return len(numbers) == len(indices) and len(strides) == 1 and min(strides) > 0


@dataclass
class TrainingStep:
    """What a rank did for one update of its first optimiser.

    Parameters
    ----------
    given, backwards : the records ``batch`` of training loaders, and ``backward``.
    scale : GradScaler's, by which the loss is multiplied; 1 without.
    exchanged : the batches, counted from 1 in this step, during which gradients were exchanged by
        hand; those of DDP are not seen.
    """

    given: list[Record] = field(default_factory=list)
    backwards: list[Record] = field(default_factory=list)
    scale: float = 1.0
    exchanged: set[int] = field(default_factory=set)

    @property
    def batches(self) -> int:
        """The number of batches that its loaders gave."""
        return len(self.given)

    @property
    def loaded(self) -> int | None:
        """The samples of these batches; None if they are not known."""
        rows: list[Any] = [one.get("indices") for one in self.given]
        return None if None in rows else sum(map(len, rows))

    @property
    def samples(self) -> int | None:
        """The samples that the losses are computed of, by the model's inputs; else those loaded.

        A loss that has another number, or with a loader none, says that the inputs do not tell; so
        do several losses a batch.
        """
        rows = [one["forwards"][0][0] if len(one["forwards"]) == 1 else 0 for one in self.backwards]
        losses = [(one["loss"] or {}).get("samples") for one in self.backwards]
        told = not self.given or len(self.given) >= len(rows)
        for count, in_loss in zip(rows, losses, strict=True):
            told &= bool(count) and (in_loss == count or (in_loss is None and not self.given))
        return sum(rows) if told and rows else self.loaded or None

    @property
    def takes_a_part(self) -> bool:
        """Whether the model gets fewer samples than the loader gave, as when ranks slice a batch.

        Inputs may have another dimension first, so a loss of the whole batch says no.
        """
        inputs = sum(one["forwards"][0][0] or 0 for one in self.backwards if one["forwards"])
        in_losses = sum((one["loss"] or {}).get("samples") or 0 for one in self.backwards)
        return 0 < inputs < 0.9 * (self.loaded or 0) and in_losses != self.loaded

    @property
    def accumulates(self) -> bool:
        """Whether each of several batches has its own backward pass."""
        return self.batches > 1 and self.batches == len(self.backwards)


def training_steps(rank: RankRecords) -> list[TrainingStep]:
    """Return a rank's steps in order."""
    trained = trained_epochs(rank)
    optimizer = min((one["o"] for one in rank.by_kind["step"]), default=None)
    steps, now = [], TrainingStep()
    for record in rank.records:
        kind = record["k"]
        if kind == "batch" and (record["l"], record["epoch"]) in trained:
            now.given.append(record)
        elif kind == "backward":
            now.backwards.append(record)
        elif kind == "call" and record.get("content") == "gradient":
            now.exchanged.add(now.batches)
        elif kind == "step" and record["o"] == optimizer:
            now.scale = record.get("scale") or 1.0
            steps.append(now)
            now = TrainingStep()
    return steps


def local_batches(recording: Recording) -> dict[int, int] | None:
    """Return the samples that each rank has in most of its steps; None if a rank's are unknown.

    The last step of an epoch may have fewer, and a loader may be a batch ahead.
    """
    sizes = {}
    for rank in recording.ranks:
        counts = Counter(step.samples for step in training_steps(rank))
        (most, times), *_ = counts.most_common(1) or [(None, 0)]
        if most is None or most == 0 or times * 2 < counts.total():
            return None
        sizes[rank.rank] = most
    return sizes if len(sizes) == recording.size else None
