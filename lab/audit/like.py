"""What an audited script does differently from a right one: ``lab audit --like``.

``FACTS`` read from the records of each rank what it did. ``compare_runs`` returns those that differ
between two runs on equally many ranks. Not compared is what differs between runs of one program
with another seed, or between two right programs: values of losses, names, the order of lines, how
messages are cut into buckets. What a text has in brackets is said, but not compared.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from common.errors import UserError
from common.say import bytes_text, count, counts, listed
from lab.audit.findings.endings import came_to_end, short_epochs_of
from lab.audit.findings.epochs import is_sequential, loaders_of
from lab.audit.findings.private import shared_part
from lab.audit.findings.where import SETUP
from lab.audit.probe.coordinates import COORDINATES
from lab.audit.recording import Numbers, RankRecords, Recording, RecordReader
from lab.audit.records import (
    AnyRecord,
    Backward,
    CollectiveCall,
    DdpBuilt,
    DdpMissed,
    Evaluation,
    Forward,
    Loader,
    Parameter,
    Parameters,
    RandomForward,
    Saved,
    Step,
    Trained,
    Weights,
)

# What a rank did; of a number the size is compared.
Fact = Callable[[RankRecords], str | float]
_SOON = 8  # steps
_TIMES = 1.5  # at most between numbers of equal programs with other random numbers
_THROUGH = {"ddp": "DDP", "bypass": "the model past its DDP", "module": "the model without DDP"}
# Settings of an optimiser that change how it computes or what its schedule does, not its rule.
_NO_RULE = re.compile("foreach|fused|capturable|differentiable|eps|(initial|max|min|base)_.*")
_IN_BRACKETS = re.compile(r" \([^)]*\)")


class Difference(msgspec.Struct):
    """A respect in which two scripts differ.

    ranks : on how many ranks it was seen first.
    here, there : what each does, and the line that shows it.
    """

    what: str
    ranks: int
    here: str
    here_at: str | None
    there: str
    there_at: str | None

    def __str__(self) -> str:
        here = f"{self.here}, at {self.here_at}" if self.here_at else self.here
        there = f"{self.there}, at {self.there_at}" if self.there_at else self.there
        return f"{self.what}:\nhere  {here}\nthere {there}"


class Likeness(msgspec.Struct):
    """How a script differs from a right one.

    reference : the right one, as ``--like`` names it.
    ranks : the numbers of ranks on which both trained.
    headline : what the audit says of the right one; None if it says "right", or did not run it.
    """

    reference: str
    ranks: Sequence[int]
    differences: Sequence[Difference]
    headline: str | None = None

    @property
    def heading(self) -> str:
        """What was compared."""
        return f"Compared with {self.reference} on {counts(self.ranks, 'rank')}"

    @property
    def shown(self) -> list[str]:
        """What is said of it."""
        texts = list(map(str, self.differences))
        if not self.ranks:
            texts.append("nothing was compared: not both trained on equally many ranks")
        elif not texts:
            texts.append("no difference in what was compared")
        if self.headline is not None:
            texts.append(f"of {self.reference} itself the audit says: {self.headline}")
        return texts


def kept_recordings(folder: Path) -> list[Recording]:
    """Return the runs whose records ``--keep`` left in a folder. Raises UserError without any."""
    recordings = []
    for records in sorted(folder.glob("*-ranks")):
        recordings.append(shared_part(RecordReader(records).recording()))
    if not any(recording.steps for recording in recordings):
        raise UserError(
            f"--like: {folder} has no records of a training: give a script, or the folder that "
            "lab audit --keep has filled"
        )
    return recordings


def compare_runs(reference: str, here: Sequence[Recording], there: Sequence[Recording]) -> Likeness:
    """Return each difference once, of the first number of ranks on which it shows."""
    by_size = {recording.size: recording for recording in there if recording.steps}
    both = {run.size: run for run in here if run.steps and run.size in by_size}
    found: dict[str, Difference] = {}
    for size, mine in both.items():
        theirs = by_size[size]
        facts = dict(FACTS)
        if came_to_end(mine) and came_to_end(theirs):
            facts.update(FACTS_OF_ENDED)
            if not short_epochs_of(mine) and not short_epochs_of(theirs):
                facts.update(FACTS_OF_WHOLE)
        for what, (kind, read) in facts.items():
            one = {rank.rank: read(rank) for rank in mine.ranks}
            other = {rank.rank: read(rank) for rank in theirs.ranks}
            if what not in found and _differ(one, other):
                found[what] = Difference(
                    what, size, _text(one), _line(mine, kind), _text(other), _line(theirs, kind)
                )
    return Likeness(reference, sorted(both), list(found.values()))


def _differ(one: Mapping[int, str | float], other: Mapping[int, str | float]) -> bool:
    """Return whether ranks did something else."""
    for rank, here in one.items():
        there = other.get(rank)
        if isinstance(here, float) and isinstance(there, float):
            if max(here, there) > _TIMES * min(here, there):
                return True
        elif _IN_BRACKETS.sub("", str(here)) != _IN_BRACKETS.sub("", str(there)):
            return True
    return len(one) != len(other)


def _text(by_rank: Mapping[int, str | float]) -> str:
    """Return what holds on all ranks, else what holds on each."""
    texts = {}
    for rank, value in by_rank.items():
        texts[rank] = f"{value:.3g}" if isinstance(value, float) else value
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())


def _line(recording: Recording, kind: type[AnyRecord]) -> str | None:
    """Return the first known line of records of a kind."""
    found = None
    for record in recording.of(kind):
        if getattr(record, "name", None) not in SETUP:
            found = found or getattr(record, "at", None)
    return None if found is None else str(found)


def _kinds(texts: Iterable[str]) -> str:
    return listed(sorted(set(texts))) or "none"


def _usual(texts: Sequence[str]) -> str:
    """Return the text of at least half of the cases, else "various"."""
    [(text, times)] = Counter(texts).most_common(1) or [("none", 0)]
    return text if 2 * times >= len(texts) else "various"


# --- forward and backward passes ---


def _of_forwards(read: Callable[[Backward, Forward], str]) -> Fact:
    """Return what reads all forwards that train."""

    def fact(rank: RankRecords) -> str:
        passes = rank.of(Backward)
        return _kinds(read(one, forward) for one in passes for forward in one.forwards)

    return fact


def _through(backward: Backward, forward: Forward) -> str:
    averages = " without averaging" if backward.synced is False else ""
    return _THROUGH[forward.through] + averages


def _of_steps(read: Callable[[Sequence[Backward]], str]) -> Fact:
    """Return what reads what the backward passes of most steps have."""

    def fact(rank: RankRecords) -> str:
        steps: dict[int, list[Backward]] = defaultdict(list)
        for backward in rank.of(Backward):
            steps[backward.step].append(backward)
        return _usual([read(passes) for passes in steps.values()])

    return fact


def _rows(passes: Sequence[Backward]) -> str:
    first = [backward.forwards[0] for backward in passes if backward.forwards]
    return str(sum(forward.samples or 0 for forward in first))


def _loss(passes: Sequence[Backward]) -> str:
    """Return the kinds of losses, and how much they count together."""
    losses = [backward.loss for backward in passes if backward.loss is not None]
    kinds = _kinds(f"{loss.node.partition('Backward')[0]}, {loss.reduction}" for loss in losses)
    return f"{kinds}, weight {sum(loss.arriving for loss in losses):.3g}"


def _missed(rank: RankRecords) -> str:
    texts = []
    for missed in rank.of(DdpMissed):
        numbers = {"unused": missed.unused, "late": missed.late, "converted": missed.converted}
        texts.append(listed(f"{len(names)} {how}" for how, names in numbers.items() if names))
    return _kinds(filter(None, texts))


# --- updates ---


def _of_updates(read: Callable[[Step], str]) -> Fact:
    """Return what reads what most updates have."""
    return lambda rank: _usual([read(step) for step in rank.of(Step)])


def _clips(step: Step) -> str:
    scaled = " of scaled gradients" if step.scale != 1 else ""
    texts = [f"{clip.kind} to {clip.limit}{'' if clip.unscaled else scaled}" for clip in step.clips]
    return listed(texts) or "none"


def _optimizers(rank: RankRecords) -> str:
    """Return the classes and settings of the optimisers, in the first step of each."""
    first: dict[int, str] = {}
    for step in rank.of(Step):
        given = sorted(step.settings.items())
        rule = [f"{name} {value}" for name, value in given if value and not _NO_RULE.match(name)]
        first.setdefault(step.optimizer_number, " ".join([step.optimizer, *rule]))
    return _kinds(first.values())


def _rates(rank: RankRecords) -> str:
    """Return the learning rates of each optimiser at first, soon after, and how they change."""
    series: dict[int, list[str]] = defaultdict(list)
    for step in rank.of(Step):
        series[step.optimizer_number].append(listed(f"{rate or 0:.4g}" for rate in step.lr))
    texts = []
    for rates in series.values():
        changes = sum(one != other for one, other in pairwise(rates))
        how = "at each step" if changes > 0.8 * (len(rates) - 1) else "at times"
        soon = min(_SOON, len(rates) - 1)
        later = f"{rates[soon]} after {count(soon, 'step')}, changed {how}"
        texts.append(f"{rates[0]}, {later if changes else 'constant'}")
    return _kinds(texts)


def _update_size(rank: RankRecords) -> float:
    """Return by how much of their norm a step changes the weights, as a median."""
    shares = []
    for before, after in pairwise(rank.of(Weights)):
        weights = rank.numbers(before.values)
        updated = rank.numbers(after.values)
        same = after.optimizer_number == before.optimizer_number
        if same and after.step == before.step + 1 and len(weights) == len(updated):
            shares.append(float(np.linalg.norm(updated - weights) / np.linalg.norm(weights)))
    return float(np.median(shares or [0.0]))


def _unchanged(rank: RankRecords) -> str:
    """Return how many parameters of the optimisers never change, and which."""
    changes: dict[str, bool] = {}
    for row, first, last in _first_and_last(rank):
        changes[row.name] = changes.get(row.name, False) or not np.array_equal(first, last)
    names = [name for name, changed in changes.items() if not changed]
    which = f" ({listed(names, most=6)})" if names else ""
    return f"{len(names)}{which}"


def _first_and_last(rank: RankRecords) -> Iterator[tuple[Parameter, Numbers, Numbers]]:
    """Yield the samples of each parameter before the first step and after the last."""
    rows: dict[int, list[Parameter]] = defaultdict(list)
    for record in rank.of(Parameters):
        rows[record.optimizer_number] += record.rows
    for number, held in rows.items():
        every = [rank.numbers(w.values) for w in rank.of(Weights) if w.optimizer_number == number]
        begin = 0
        for row in held:
            end = begin + min(row.numel, COORDINATES)
            seen = [values[begin:end] for values in every if len(values) >= end]
            if seen:
                yield row, seen[0], seen[-1]
            begin = end


def _held(rank: RankRecords) -> str:
    rows = {row.tensor: row for record in rank.of(Parameters) for row in record.rows}
    numbers = sum(row.numel for row in rows.values())
    return f"{count(len(rows), 'parameter')} of {count(numbers, 'number')}"


# --- messages ---


def _messages(calls: Iterable[CollectiveCall]) -> str:
    """Return the kinds of calls, with the bytes of each kind: buckets do not count."""
    total: Counter[str] = Counter()
    for call in calls:
        kind = " ".join(filter(None, [call.name.strip("_"), call.op, "of", call.content]))
        total[kind] += 0 if "object" in call.name else call.nbytes
    return listed(f"{kind}, {bytes_text(size)}" for kind, size in sorted(total.items())) or "none"


def _calls_before(rank: RankRecords) -> str:
    begin = next((backward.t for backward in rank.of(Backward)), 0.0)
    calls = [call for call in rank.of(CollectiveCall) if call.t < begin]
    return _messages(call for call in calls if call.name not in SETUP)


def _calls_in_steps(rank: RankRecords) -> str:
    steps: dict[int, list[CollectiveCall]] = {step.step: [] for step in rank.of(Step)}
    for call in rank.of(CollectiveCall):
        if call.step in steps and call.name not in SETUP:
            steps[call.step].append(call)
    return _usual([_messages(calls) for calls in steps.values()])


# --- samples ---


def _order(rank: RankRecords) -> str:
    """Return how the training loaders order their samples in their first epoch."""
    first = [loader.epochs[0].given for loader in loaders_of(rank, train=True)]
    return _kinds("stored" if is_sequential(given) else "shuffled" for given in first)


def _later_orders(rank: RankRecords) -> str:
    texts = []
    for loader in loaders_of(rank, train=True):
        first, *others = [epoch.given for epoch in loader.epochs]
        same = any(given and given == first[: len(given)] for given in others)
        texts.append("that of the first epoch" if same else "another")
    return _kinds(texts)


def _draws(*, train: bool) -> Fact:
    """Return what reads how many samples the first epoch of each loader has."""

    def fact(rank: RankRecords) -> str:
        texts = []
        for loader in loaders_of(rank, train=train):
            draws = sum(len(draw.innermost) for draw in loader.epochs[0].whole)
            texts.append(f"{draws:,} of a dataset of {loader.facts.length or 0:,}")
        return listed(texts) or "none"

    return fact


def _evaluation(one: Evaluation) -> str:
    drew = "with random numbers" if one.drew else "without random numbers"
    return f"in {one.mode} mode, {drew}, in {listed(one.dtypes)}"


FACTS: Mapping[str, tuple[type[AnyRecord], Fact]] = {
    "mode of the model in training": (Backward, _of_forwards(lambda _, one: str(one.mode))),
    "what runs the model": (Backward, _of_forwards(_through)),
    "types in which the model computes": (Backward, _of_forwards(lambda _, f: listed(f.dtypes))),
    "random numbers of the model in training": (
        RandomForward,
        lambda rank: "drawn" if rank.of(RandomForward) else "none",
    ),
    "rows that the model gets in a step": (Backward, _of_steps(_rows)),
    "backward passes in a step": (Backward, _of_steps(lambda passes: str(len(passes)))),
    "losses of a step": (Backward, _of_steps(_loss)),
    "times that DDP is built": (DdpBuilt, lambda rank: str(len(rank.of(DdpBuilt)))),
    "parameters that DDP misses": (DdpMissed, _missed),
    "gradients before backward": (
        Step,
        _of_updates(lambda step: "those of the step before" if step.kept else "cleared"),
    ),
    "clipping in a step": (Step, _of_updates(_clips)),
    "optimisers": (Parameters, _optimizers),
    "learning rate": (Step, _rates),
    "change of the weights in a step": (Step, _update_size),
    "parameters in optimisers": (Parameters, _held),
    "parameters that never change": (Step, _unchanged),
    "calls before the first backward": (CollectiveCall, _calls_before),
    "calls in a step": (CollectiveCall, _calls_in_steps),
    "order in the first epoch": (Loader, _order),
}
"""By what they are about: the records of the lines that show them, and what reads them."""

FACTS_OF_ENDED: Mapping[str, tuple[type[AnyRecord], Fact]] = {
    "evaluation": (Evaluation, lambda rank: _kinds(map(_evaluation, rank.of(Evaluation)))),
    "content of files": (Saved, lambda rank: _kinds(listed(s.holds) for s in rank.of(Saved))),
    "order in later epochs": (Loader, _later_orders),
}
"""Those that are compared only if both programs came to their end."""

FACTS_OF_WHOLE: Mapping[str, tuple[type[AnyRecord], Fact]] = {
    "steps": (Step, lambda rank: float(len(rank.of(Step)))),
    "epochs": (Loader, lambda rank: str(len(rank.of(Trained)))),
    "samples of the first epoch": (Loader, _draws(train=True)),
    "samples of the first evaluation": (Loader, _draws(train=False)),
    "evaluations": (Evaluation, lambda rank: str(len(rank.of(Evaluation)))),
}
"""Those that are compared only if both came there with all their batches."""
