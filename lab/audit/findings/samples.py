"""Findings about samples: which ones each rank trains on, in which order, and how many.

Samples are compared by their innermost index, per loader and within one epoch. Equal indices are
equal samples only if the ranks hold the same data, see ``epochs.same_data``.
"""

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations, pairwise, takewhile
from math import gcd
from typing import NamedTuple

from lab.audit.findings.epochs import (
    Drawn,
    Epoch,
    TrainingLoader,
    is_sequential,
    loader_line,
    local_batches,
    same_data,
    training_loaders,
    training_steps,
)
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found, gravest
from lab.audit.findings.randomness import augmentation
from lab.audit.findings.where import (
    ComputedWith,
    backward_line,
    computed_with,
    first_step_apart,
    recording_exchanges,
)
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import Backward, Batch, CodeLine, Cut, FsdpBuilt, Index, Join, Rest

Loaders = Sequence[TrainingLoader]
_SAME = 0.9  # the share of two batches, and of all batches, from which on they are the same
_MANY = 4  # epochs in a row that end early: the script takes one batch of each, so compare them
_FEWEST_IN_ORDER = 4  # samples, from which on two orders can be compared


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is found about the samples of a run."""
    if recording.global_batch is not None:
        yield _global_batch(recording, recording.global_batch)
    if len(recording.ranks) < 2:
        return
    groups = training_loaders(recording)
    if groups and any(map(_takes_parts, recording.ranks)):
        yield Unknown("samples", "the ranks compute on other samples than their loaders give")
    else:
        for loaders in groups:
            yield from _check_loaders(recording, loaders)
    in_step = _in_step(recording, groups)
    if in_step is not None:
        yield in_step
    if not any(_draws_by_index(loader) for loaders in groups for loader in loaders):
        yield _same_inputs(recording)


def _draws_by_index(loader: TrainingLoader) -> bool:
    return any(epoch.batches for epoch in loader.epochs)


def _takes_parts(rank: RankRecords) -> bool:
    """Return whether a rank's model gets, in most steps, fewer samples than the loader gave."""
    steps = training_steps(rank)
    partial = sum(step.takes_a_part for step in steps)
    return 2 * partial > len(steps)


def _check_loaders(recording: Recording, loaders: Loaders) -> Iterator[Outcome]:
    """Compare the ranks' loaders that belong together.

    Coverage is checked unless two ranks may have the same samples, or hold different data.
    """
    compared = [_compare(one, other) for one, other in combinations(loaders, 2)]
    alike = [outcome for outcome, _ in compared if isinstance(outcome, Finding | Unknown)]
    data = {equal_indices_tell for _, equal_indices_tell in compared}  # True, False or None
    if all(isinstance(outcome, Right) for outcome, _ in compared):
        yield Right("samples", "every rank trains on different samples")
        yield from augmentation(recording, loaders)
    yield from alike
    if not alike and False not in data:
        covers = _coverage(recording, loaders, one_dataset=None not in data)
        if covers is not None:
            yield covers
    yield from _same_order(loaders, was_cut=bool(recording.of(Cut)))
    counts = _batch_counts(recording, loaders)
    if counts is not None:
        yield counts


# --- how many samples ---


def _global_batch(recording: Recording, asked: int) -> Outcome:
    """Compare the samples of a step on all ranks with what was asked for.

    Each rank may round each of its micro-batches up or down by less than one sample.
    """
    local = local_batches(recording)
    if local is None:
        return Unknown("global batch", "the samples of a step are not known on every rank")
    total = sum(local.values())
    steps = [step for rank in recording.ranks for step in training_steps(rank)]
    micro = max([1, *(len(step.backwards) for step in steps)])
    if abs(total - asked) < recording.size * micro:
        return Right("global batch", f"the global batch is {total:,} samples, as asked for")
    line = loader_line(recording) or backward_line(recording)
    return found("wrong-global-batch", line, total=total, asked=asked, counts=_by_rank(local))


def _by_rank(counts: Mapping[int, int | None]) -> str:
    return ", ".join(f"rank {rank} has {count:,}" for rank, count in sorted(counts.items()))


# --- the same samples on two ranks ---


def _compare(one: TrainingLoader, other: TrainingLoader) -> tuple[Outcome | None, bool | None]:
    """Compare two ranks' batches of the same number in the same epoch.

    Equal batches whose targets never agree are not the same samples.

    Returns
    -------
    outcome : ``Right`` if no sample of a batch is in the other rank's, or their data differ; where
        nearly all are, a finding, or ``Unknown`` if ``data`` is unknown; None where some are.
    data : whether equal indices are equal samples; None if unknown.
    """
    mine = one.drawn
    theirs = other.drawn
    both = [place for place in mine if place in theirs]
    same = bool(both) and len(both) >= _SAME * min(len(mine), len(theirs))
    data = same_data(one, other)
    if same and _targets_never_agree(one.records, other.records):
        data = None if data else False
    differs = not both or data is False
    if differs and data is not True and _share_contents(mine, theirs):
        return Unknown(
            "samples",
            f"whether ranks {one.rank} and {other.rank} train on different samples: their indices "
            "differ, but in an epoch both get samples of equal content, as from datasets that each "
            "rank shuffles by itself",
        ), data
    if mine and theirs and differs:
        return Right("samples", "every rank trains on different samples"), data
    if not same:
        return None, data
    ranks = f"ranks {one.rank} and {other.rank}"
    if data is None:
        return Unknown(
            "samples",
            f"whether {ranks} train on the same samples: their indices are equal, but "
            "the audit cannot tell whether they index the same data",
        ), data
    return _same_samples(ranks, both, one.facts.line), data


def _share_contents(mine: Mapping[Drawn, Hashable], theirs: Mapping[Drawn, Hashable]) -> bool:
    """Return whether two ranks get many samples of equal content in one epoch."""
    one = {(epoch, content) for (epoch, *_), content in mine.items() if content is not None}
    other = {(epoch, content) for (epoch, *_), content in theirs.items() if content is not None}
    mostly_different = 2 * len(one) > len(mine)
    return mostly_different and len(one & other) > len(one) / 20


def _same_samples(ranks: str, drawn: Sequence[Drawn], line: CodeLine | None) -> Finding:
    """Return that two ranks train on the same samples: in which batches, from the first one on."""
    batches = Counter((epoch, batch) for epoch, batch, _ in drawn)
    epoch, batch = min(batches)
    return found(
        "same-samples",
        line,
        kind="indices",
        ranks=ranks,
        epoch=epoch,
        batch=batch,
        count=batches[epoch, batch],
        samples=_listed([index for *_, index in drawn]),
        batches=len(batches),
    )


def _listed(samples: Sequence[Index]) -> str:
    return ", ".join(map(str, samples[:4]))


def _passes(rank: RankRecords) -> dict[tuple[int, int], ComputedWith]:
    """Return by step and micro-batch each backward whose inputs are known."""
    passes = {}
    for backward in rank.of(Backward):
        computed = computed_with(backward)
        if computed.inputs and None not in computed.inputs:
            passes[backward.step, backward.micro] = computed
    return passes


def _both_passes(one: RankRecords, other: RankRecords) -> list[tuple[ComputedWith, ComputedWith]]:
    """Return the passes of two ranks in each backward that both have."""
    mine = _passes(one)
    theirs = _passes(other)
    return [(mine[place], theirs[place]) for place in mine if place in theirs]


def _targets_never_agree(one: RankRecords, other: RankRecords) -> bool:
    agree = {
        mine.target == theirs.target
        for mine, theirs in _both_passes(one, other)
        if mine.target is not None and theirs.target is not None
    }
    return agree == {False}


def _same_inputs(recording: Recording) -> Outcome:
    """Without indices: compare the ranks' inputs and targets, backward by backward.

    Inputs that never change may be anything, so then equal targets must be known. A model that is
    sharded may rightly compute one sample on several ranks.
    """
    first, *others = recording.ranks
    for other in [] if recording.of(FsdpBuilt) else others:
        both = _both_passes(first, other)
        inputs_change = len({mine.inputs for mine, _ in both}) > 1
        telling = inputs_change or all(mine.target is not None for mine, _ in both)
        if len(both) >= 2 and telling and all(mine == theirs for mine, theirs in both):
            ranks = f"ranks {first.rank} and {other.rank}"
            line = backward_line(recording)
            return found("same-samples", line, kind="inputs", ranks=ranks, count=len(both))
    return Unknown("samples", "no DataLoader draws them by index")


# --- each sample once in an epoch ---


def _coverage(recording: Recording, loaders: Loaders, *, one_dataset: bool) -> Outcome | None:
    """Return whether the ranks together see each sample once in an epoch, by the worst epoch.

    An epoch of which only a part is known counts if there is none else.
    """
    replicas = _replicas(loaders)
    length = _length(loaders) or 0
    if replicas > recording.size:  # the samplers also share out to ranks that do not exist
        share = -(-length // replicas)  # rounded up
        return found(
            "uneven-coverage",
            loaders[0].facts.line,
            kind="replicas",
            missing=length - share * recording.size,
            length=length,
            replicas=replicas,
            ranks=recording.size,
        )
    epochs = list(enumerate(zip(*(loader.epochs for loader in loaders), strict=False), 1))
    whole = [
        (number, of_ranks) for number, of_ranks in epochs if all(epoch.whole for epoch in of_ranks)
    ]
    return gravest(
        Coverage(loaders, number, of_ranks).outcome(one_dataset=one_dataset)
        for number, of_ranks in whole or epochs
    )


class Coverage:
    """What the ranks together drew in an epoch.

    Attributes
    ----------
    number : of the epoch, from 1.
    whole : all ranks' samples of the epoch are known.
    left : all ranks left it early.
    draws : by rank, the records of what it drew.
    shares : by rank, the samples that it drew.
    counts : how often each sample was drawn.
    repeats : how many draws there were beyond one of each sample.
    batch : how many samples the largest first batch of a rank has.
    """

    def __init__(self, loaders: Loaders, number: int, epochs: Sequence[Epoch]) -> None:
        self.loaders = loaders
        self.number = number
        self.whole = all(epoch.whole for epoch in epochs)
        self.left = all(epoch.left for epoch in epochs)
        self.draws: list[list[Batch | Rest]] = [
            epoch.whole if self.whole else [*epoch.batches] for epoch in epochs
        ]
        self.shares = [[index for draw in rank for index in draw.innermost] for rank in self.draws]
        self.counts = Counter(chain.from_iterable(self.shares))
        self.repeats = self.counts.total() - len(self.counts)
        self.batch = max((len(rank[0].indices or ()) for rank in self.draws if rank), default=0)

    @cached_property
    def in_strides(self) -> bool:
        """Whether each rank's samples have equal distances."""
        return all(is_sequential(sorted(set(share))) for share in self.shares)

    def outcome(self, *, one_dataset: bool) -> Outcome | None:
        """Return whether samples come twice in the epoch or are left out of it.

        None if a rank drew no samples.

        one_dataset : equal indices are equal samples.
        """
        if not all(self.shares):
            return None
        if self.repeats > self._most_repeats():
            return self._repeated(one_dataset=one_dataset)
        if self.left:
            return Right("coverage", "no sample comes twice in epochs that the script leaves early")
        if not self.whole:
            return Unknown("coverage", "the samples of a whole epoch are not known")
        length = self._length()
        holes = self._holes(length)
        if len(holes) > self._rounding:
            return found(
                "uneven-coverage",
                self.loaders[0].facts.line,
                kind="holes",
                epoch=self.number,
                count=len(holes),
                first=_listed(holes),
            )
        return self._left_over(length)

    @property
    def _rounding(self) -> int:
        """How many samples may be missing or repeated since ranks or batches do not divide them."""
        return max(len(self.shares), self.batch)

    def _most_repeats(self) -> float:
        """Return how many repeats are no fault.

        So that all ranks have equally many, each rank may repeat a sample, or with shuffled samples
        fill up a batch. Where only the first batches are known, a tenth may come twice by chance.
        """
        padding = len(self.shares) * (1 if self.in_strides else self.batch)
        by_chance = 0 if self.whole else self.counts.total() / 10
        return max(padding, by_chance)

    def _repeated(self, *, one_dataset: bool) -> Outcome:
        """Judge samples that come twice: a fault if ranks share them, and one rank alone does not.

        one_dataset : equal indices are equal samples.
        """
        within_a_rank = max(len(share) - len(set(share)) for share in self.shares)
        if within_a_rank > (self._rounding if self.whole else 0):
            return Unknown("coverage", "the sampler draws samples repeatedly on a rank")
        if not one_dataset:
            return Unknown(
                "coverage",
                "the ranks draw the same indices, but the "
                "audit cannot tell whether these belong to the same data",
            )
        return found(
            "uneven-coverage",
            self.loaders[0].facts.line,
            kind="repeats",
            epoch=self.number,
            different=len(self.counts),
            several=sum(count > 1 for count in self.counts.values()),
        )

    def _length(self) -> int | None:
        """Return the number of samples in the dataset whose indices are counted."""
        all_outer = all(draw.innermost == draw.indices for rank in self.draws for draw in rank)
        if all_outer:
            return _length(self.loaders)
        return _common([loader.facts.inner_length for loader in self.loaders])

    def _holes(self, length: int | None) -> list[int]:
        """Return the samples left out between others; none unless the ranks draw in strides."""
        # Indices beyond the length are those of several datasets.
        if not self.in_strides or max(self.counts) >= (length or 0):
            return []
        drawn = sorted(self.counts)
        stride = gcd(*(index - drawn[0] for index in drawn))  # of all ranks together: mostly 1
        return [index for index in range(drawn[0], drawn[-1], stride) if index not in self.counts]

    def _left_over(self, length: int | None) -> Outcome:
        """Judge samples that are left out.

        That is a fault only if something shows that they were meant to be seen: a subset, a
        validation split or a limit leaves samples out on purpose.
        """
        if length is None:
            return Right("coverage", "no sample comes twice in an epoch")
        missing = max(0, length - len(self.counts))
        if missing > len(self.shares) * self.batch:
            return Unknown(
                "coverage",
                f"whether {missing:,} of {length:,} samples are left out of each epoch on purpose",
            )
        details = f"{length:,} samples"
        if self.repeats:
            details += f", {self.repeats:,} padded"
        if missing:
            details += f", {missing:,} left over"
        return Right("coverage", f"each epoch covers the dataset once ({details})")


def _common(values: Sequence[int | None]) -> int | None:
    """Return a number that all ranks' loaders have in common, else None."""
    return values[0] if len(set(values)) == 1 else None


def _length(loaders: Loaders) -> int | None:
    """Return the number of samples in the dataset that all ranks' loaders have, else None."""
    return _common([loader.facts.length for loader in loaders])


def _replicas(loaders: Loaders) -> int:
    """Return among how many ranks all ranks' samplers share the samples out; 0 if they do not."""
    return _common([loader.facts.replicas for loader in loaders]) or 0


# --- the order, and the number of batches ---


class _Order(NamedTuple):
    """How an epoch begins.

    epoch : its number, from 2.
    begin : the first samples of the epoch before, as many as both epochs have.
    same : the epoch begins with the same ones.
    """

    epoch: int
    begin: list[Index]
    same: bool


def _same_order(loaders: Loaders, *, was_cut: bool) -> Iterator[Outcome]:
    """Compare the first batches of each epoch with those of the epoch before.

    was_cut : another epoch might have followed.

    Nothing is said where some epochs repeat the order and others do not.
    """
    orders = [order for loader in loaders for order in _orders(loader)]
    all_alike = len({order.same for order in orders}) == 1
    if all_alike:
        yield _judge_order(loaders[0], orders[0])
    one_epoch = max(len(loader.epochs) for loader in loaders) == 1
    if loaders[0].facts.replicas and one_epoch and was_cut:
        yield Unknown("order", "one epoch was seen")


def _orders(loader: TrainingLoader) -> Iterator[_Order]:
    """Yield a rank's order in each epoch that can be compared with the one before.

    A single batch tells nothing. An epoch that the script left early, as to look at a batch, counts
    only if there is none else and they are many.
    """
    kept = [epoch for epoch in loader.epochs if not epoch.left]
    if len(kept) < 2 and len(loader.epochs) >= _MANY:
        shown = loader.epochs
    else:
        shown = [epoch for epoch in kept if len(epoch.batches) >= 2]
    for number, (first, second) in enumerate(pairwise(shown), 2):
        count = min(len(first.given), len(second.given))
        begin = first.given[:count]
        if count >= _FEWEST_IN_ORDER and not is_sequential(begin):
            yield _Order(number, begin, begin == second.given[:count])


def _judge_order(loader: TrainingLoader, order: _Order) -> Outcome:
    """Judge an order that all epochs of all ranks repeat, or that none repeats."""
    if not order.same:
        return Right(
            "order", f"epoch {order.epoch} has a different order from epoch {order.epoch - 1}"
        )
    sampler = str(loader.facts.sampler)
    if "Distributed" in sampler or sampler == "RandomSampler":
        return found(
            "same-order",
            loader.facts.line,
            epoch=order.epoch,
            count=len(order.begin),
            rank=loader.rank,
            samples=_listed(order.begin),
        )
    return Unknown(
        "order",
        f"whether the order is meant to be the same in every epoch: {sampler} gives the "
        f"same first {len(order.begin)} samples again",
    )


def _batch_counts(recording: Recording, loaders: Loaders) -> Outcome | None:
    """Compare how many batches the ranks have in an epoch.

    Not a fault if the ranks stay in step where an epoch ends, since their loops then end alike or
    begin anew, or if Join lets those wait that have fewer. None if a number is not known.
    """
    batches = _common([loader.facts.batches for loader in loaders])
    if batches is not None:
        return Right("batches", f"every rank has {batches:,} batches in an epoch")
    counts = {loader.rank: loader.facts.batches for loader in loaders}
    if None in counts.values():
        return None
    listed = _by_rank(counts)
    if recording.of(Join):
        return Right("batches", f"Join lets the ranks with fewer batches wait ({listed})")
    return _unequal_batches(recording, loaders, listed)


def _unequal_batches(recording: Recording, loaders: Loaders, listed: str) -> Outcome:
    """Judge different numbers of batches: do the ranks stay in step where an epoch ends?"""
    taken = [_epochs_of_batches(loader) for loader in loaders]
    # an end of an epoch was seen: the script ended by itself, or a rank went on to a further epoch
    end_seen = not recording.of(Cut) or any(len(set(epochs)) > 1 for epochs in taken)
    equally_many = len({len(epochs) for epochs in taken}) == 1
    if end_seen and equally_many and not recording.hung:
        return Unknown(
            "batches",
            f"whether the ranks' different numbers of batches matter ({listed}): they "
            "stay in step where an epoch ends",
        )
    return found(
        "different-batch-counts",
        loaders[0].facts.line,
        kind="ends" if end_seen else "not seen",
        sure=end_seen,
        counts=listed,
    )


def _in_step(recording: Recording, groups: Sequence[Loaders]) -> Outcome | None:
    """Compare how many batches each rank takes for each update.

    Other numbers are a fault if the ranks, which have equally many batches, come to the next epoch
    at different updates: then an exchange combines batches of different epochs. None where nothing
    is compared.
    """
    comparable = len(groups) == 1 and len(groups[0]) == recording.size
    if not comparable or recording.of(Join) or not recording_exchanges(recording):
        return None
    taken = [[step.batches for step in training_steps(rank)] for rank in recording.ranks]
    if not all(taken) or _common([loader.facts.batches for loader in groups[0]]) is None:
        return None
    for number, counts in enumerate(zip(*taken, strict=False)):
        if len(set(counts)) > 1:
            return _out_of_step(recording, number, counts)
    return Right("in step", "every update takes equally many batches on all ranks")


def _out_of_step(recording: Recording, step: int, counts: Sequence[int]) -> Outcome:
    """Judge the first update for which the ranks take different numbers of batches."""
    listed = ", ".join(
        f"rank {rank.rank} takes {counts[number]}" for number, rank in enumerate(recording.ranks)
    )
    apart = first_step_apart(recording)
    if apart == sys.maxsize:
        return Unknown(
            "in step",
            f"whether a rank may skip a batch by itself: in step {step} {listed}, and all ranks "
            "end their epochs at the same update",
        )
    return found("out-of-step", backward_line(recording), step=step, counts=listed, apart=apart)


def _epochs_of_batches(loader: TrainingLoader) -> list[int]:
    """Return the epoch of each batch that a rank took before the cut."""
    before = takewhile(lambda record: not isinstance(record, Cut), loader.records.records)
    return [
        record.epoch
        for record in before
        if isinstance(record, Batch) and record.loader_number == loader.facts.number
    ]
