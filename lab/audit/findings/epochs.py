"""What each rank drew and did: the epochs of its training loaders, and its steps.

``training_loaders`` returns the ranks' training loaders side by side. Samples are named by their
index in the innermost dataset, see probe/data.py; ``same_data`` says whether one index is one
sample on two ranks.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import mode
from typing import NamedTuple

from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    Backward,
    Batch,
    CodeLine,
    CollectiveCall,
    EpochOver,
    Index,
    Loader,
    Record,
    Rest,
    Step,
    Trained,
)

EpochNumber = tuple[int, int]  # a loader's number, and the epoch's
Drawn = tuple[int, int, Index]  # a sample by epoch, batch (both from 1) and innermost index


class Epoch(NamedTuple):
    """One iteration of a rank over a loader.

    batches : the records of those that the script was given and whose indices are known.
    given : their outer indices, of the loader's own dataset.
    whole : these records and that of what was left when the run was cut, together all samples of
        the epoch; empty if they are not all known.
    left : the script left it early: neither the loader nor the cut ended it.
    """

    batches: list[Batch]
    given: list[Index]
    whole: list[Batch | Rest]
    left: bool


@dataclass(frozen=True)
class TrainingLoader:
    """A loader that a rank trained with, or evaluated.

    Parameters
    ----------
    records : all records of the rank.
    facts : its record ``loader``.
    epochs : those in which the rank trained, in order. A look at a batch beforehand is none.
    """

    rank: int
    records: RankRecords
    facts: Loader
    epochs: list[Epoch]

    @property
    def drawn(self) -> dict[Drawn, Hashable]:
        """Hashes of the samples as the script was given them, None where that is not known."""
        found: dict[Drawn, Hashable] = {}
        for number, epoch in enumerate(self.epochs, 1):
            for b, batch in enumerate(epoch.batches, 1):
                for index, content in zip_longest(batch.innermost, batch.contents or ()):
                    found[number, b, index] = content
        return found


def training_loaders(recording: Recording) -> list[list[TrainingLoader]]:
    """Return the training loaders, those of all ranks that belong together in one list, by rank.

    The n-th training loader of each rank belongs to the n-th of the others. Ranks without any are
    left out, as a parameter server is; with other numbers of loaders nothing is returned.
    """
    return _side_by_side(recording, train=True)


def evaluation_loaders(recording: Recording) -> list[list[TrainingLoader]]:
    """Return likewise the loaders with which no epoch trains."""
    return _side_by_side(recording, train=False)


def _side_by_side(recording: Recording, *, train: bool) -> list[list[TrainingLoader]]:
    by_rank = [loaders for rank in recording.ranks if (loaders := loaders_of(rank, train=train))]
    if len(by_rank) < 2 or len(set(map(len, by_rank))) > 1:
        return []
    groups = [list(group) for group in zip(*by_rank, strict=True)]
    return [group for group in groups if len({loader.facts.dataset for loader in group}) == 1]


def loader_line(recording: Recording) -> CodeLine | None:
    """Return the line that makes the first training loader; None without one."""
    loaders = [loader for group in training_loaders(recording) for loader in group]
    return loaders[0].facts.line if loaders else None


def loaders_of(rank: RankRecords, *, train: bool) -> list[TrainingLoader]:
    """Return the loaders with which a rank trained, or the others."""
    trained = _trained_epochs(rank)
    drawn: dict[EpochNumber, list[Batch | EpochOver | Rest]] = defaultdict(list)
    for record in rank.records:
        if isinstance(record, Batch | EpochOver | Rest):
            drawn[record.loader_number, record.epoch].append(record)
    numbers = sorted(trained if train else _untrained(drawn, trained))
    loaders = []
    for facts in rank.of(Loader):
        epochs = [_epoch(drawn[number]) for number in numbers if number[0] == facts.number]
        if epochs:
            loaders.append(TrainingLoader(rank.rank, rank, facts, epochs))
    return loaders


def _untrained(drawn: Iterable[EpochNumber], trained: set[EpochNumber]) -> list[EpochNumber]:
    """Return the epochs of loaders with which no epoch trains."""
    training = {loader for loader, _ in trained}
    return [number for number in drawn if number[0] not in training]


def _trained_epochs(rank: RankRecords) -> set[EpochNumber]:
    """Return the epochs of the batches that were the last ones before a backward pass.

    Where the probe has recorded which epochs serve training, only these count.
    """
    events = [record for record in rank.records if isinstance(record, Batch | Backward)]
    last = {
        (event.loader_number, event.epoch)
        for event, following in pairwise(events)
        if isinstance(event, Batch) and isinstance(following, Backward)
    }
    recorded = {(trained.loader_number, trained.epoch) for trained in rank.of(Trained)}
    return last & recorded if recorded else last


def _epoch(records: Sequence[Batch | EpochOver | Rest]) -> Epoch:
    """Return an epoch from its records.

    It is whole if it ended uncut with all batches, or its rest is known.
    """
    drawn = [record for record in records if not isinstance(record, EpochOver)]
    known = [draw for draw in drawn if draw.indices]
    batches = [draw for draw in known if isinstance(draw, Batch)]
    given = [index for batch in batches for index in batch.indices or ()]
    last = records[-1]
    left = isinstance(last, Batch)
    cut = isinstance(last, EpochOver) and last.cut  # without a ``Rest``: what was left is not known
    if left or cut or any(draw.indices is None for draw in drawn):
        return Epoch(batches, given, [], left)
    return Epoch(batches, given, known, left)


def same_data(one: TrainingLoader, other: TrainingLoader) -> bool | None:
    """Return whether equal inner indices mean equal samples on two ranks; None if unknown.

    The same values at enough indices tell that they do, unless many samples of one rank are equal
    anyway. Other values tell nothing, since augmentation changes them: then what the datasets
    hold tells.
    """
    mine = {index: content for (*_, index), content in one.drawn.items()}
    theirs = {index: content for (*_, index), content in other.drawn.items()}
    both = mine.keys() & theirs.keys()
    equal = {mine[index] for index in both if mine[index] == theirs[index]} - {None}
    varied = 2 * len({mine[index] for index in both}) > len(both)  # most samples differ
    if varied and len(equal) >= max(2, len(both) / 10):
        return True
    if one.facts.content is None or other.facts.content is None:
        return None
    return one.facts.content == other.facts.content


def is_sequential(indices: Sequence[Index]) -> bool:
    """Return whether indices ascend in equal strides, as they do without shuffling."""
    if {type(index) for index in indices} != {int}:
        return False
    strides = {following - index for index, following in pairwise(indices)}
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
        loaders gave; 0 if not known.
    takes_a_part : the model gets fewer samples than the loader gave, as when ranks slice a batch.
        Inputs may have another dimension first, so a loss of the whole batch says no.
    """

    def __init__(
        self, records: Sequence[Record], update: Step, trained: Collection[EpochNumber]
    ) -> None:
        self.scale = update.scale or 1.0
        self.backwards: list[Backward] = []
        self.exchanged: set[int] = set()
        given: list[Batch] = []
        for record in records:
            if isinstance(record, Backward):
                self.backwards.append(record)
            elif isinstance(record, Batch):
                if (record.loader_number, record.epoch) in trained:
                    given.append(record)
            elif isinstance(record, CollectiveCall) and record.content == "gradient":
                self.exchanged.add(len(given))
        self.batches = len(given)
        self.accumulates = self.batches > 1 and self.batches == len(self.backwards)
        loaded = _number_of_samples(given)
        inputs, in_losses = self._seen_samples()
        inputs_tell = inputs > 0 and self._inputs_tell(inputs, in_losses)
        self.samples = inputs if inputs_tell else loaded
        fewer_inputs = 0 < inputs < 0.9 * loaded
        self.takes_a_part = fewer_inputs and in_losses != loaded

    def _seen_samples(self) -> tuple[int, int]:
        """Return how many samples the models' inputs have, and how many the losses' targets."""
        inputs = 0
        in_losses = 0
        for backward in self.backwards:
            if backward.forwards:
                inputs += backward.forwards[0].samples or 0
            if backward.loss is not None:
                in_losses += backward.loss.samples or 0
        return inputs, in_losses

    def _inputs_tell(self, inputs: int, in_losses: int) -> bool:
        """Return whether the number of the model's inputs is that of the samples.

        A loss that has another number, or with a loader none, says that they do not tell; so do
        several losses a batch.
        """
        nothing_else_tells = in_losses == 0 and not self.batches
        if in_losses != inputs and not nothing_else_tells:
            return False
        several_losses_a_batch = 0 < self.batches < len(self.backwards)
        if several_losses_a_batch:
            return False
        return all(len(backward.forwards) == 1 for backward in self.backwards)


def _number_of_samples(batches: Sequence[Batch]) -> int:
    """Return how many samples batches have; 0 if that is not known of one of them."""
    if any(batch.indices is None for batch in batches):
        return 0
    return sum(len(batch.indices or ()) for batch in batches)


def training_steps(rank: RankRecords) -> list[TrainingStep]:
    """Return a rank's steps in order."""
    trained = _trained_epochs(rank)
    first = min((step.optimizer_number for step in rank.of(Step)), default=None)
    steps = []
    begin = 0
    for end, record in enumerate(rank.records, 1):  # a step's records end with its update's
        if isinstance(record, Step) and record.optimizer_number == first:
            steps.append(TrainingStep(rank.records[begin:end], record, trained))
            begin = end
    return steps


def local_batches(recording: Recording) -> dict[int, int] | None:
    """Return the samples that each rank has in most of its steps; None if a rank's are unknown.

    The last step of an epoch may have fewer, and a loader may be a batch ahead.
    """
    sizes = {}
    for rank in recording.ranks:
        counts = [step.samples for step in training_steps(rank)] or [0]
        usual = mode(counts)
        if 2 * counts.count(usual) >= len(counts):
            sizes[rank.rank] = usual
    all_known = len(sizes) == recording.size and all(sizes.values())
    return sizes if all_known else None
