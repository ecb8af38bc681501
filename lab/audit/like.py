"""What an audited script does differently from a right one: ``lab audit --like``.

``FACTS`` read from the records of each rank what it did. ``compare_runs`` returns those that differ
between two runs on equally many ranks. Not compared is what differs between runs of one program
with another seed, or between two right programs: values of losses, names, the order of lines, how
messages are cut into buckets; nor what a finding tells, such as the order of samples. What a text
has in brackets is said, but not compared.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import mode
from typing import TypeVar

import msgspec
import numpy as np

from common.errors import UserError
from common.say import bytes_text, count, counts, listed
from common.utils.gradient_fit import side_by_side
from lab.audit.findings.endings import came_to_end, short_epochs_of
from lab.audit.findings.epochs import loaders_of
from lab.audit.findings.private import shared_part
from lab.audit.findings.where import SETUP
from lab.audit.probe.coordinates import COORDINATES
from lab.audit.recording import RankRecords, Recording, RecordReader
from lab.audit.records import (
    AnyRecord,
    Backward,
    CollectiveCall,
    DdpBuilt,
    Evaluation,
    Loader,
    Parameters,
    RandomForward,
    Saved,
    Step,
    Trained,
    Weights,
)

# The kind of the records whose line shows it, and what reads what a rank did: text, or a number of
# which the size is compared.
Fact = tuple[type[AnyRecord], Callable[[RankRecords], str | float]]
Kind = TypeVar("Kind", bound=AnyRecord)
_SOON = 8  # steps
_FIRST = 16  # of equally many steps the changes are alike, of a longer run they are smaller
_TIMES = 1.5  # at most between numbers of equal programs with other random numbers
_THROUGH = {"ddp": "DDP", "bypass": "the model past its DDP", "module": "the model without DDP"}
# Settings of an optimiser that change how it computes or what its schedule does, not its rule.
_NO_RULE = re.compile("foreach|fused|capturable|differentiable|eps|(initial|max|min|base)_.*")
_VARIOUS = "various"
_DRAWN = {True: "new", False: "no"}
_IN_BRACKETS = re.compile(r" \([^()]*\)")


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
        here = ", at ".join(filter(None, [self.here, self.here_at]))
        there = ", at ".join(filter(None, [self.there, self.there_at]))
        return f"{self.what}, on {count(self.ranks, 'rank')}:\nhere  {here}\nthere {there}"


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


def compare_runs(
    reference: str,
    here: Sequence[Recording],
    there: Sequence[Recording],
    headline: str | None = None,
) -> Likeness:
    """Return each difference once, of the first number of ranks on which it shows."""
    by_size = {recording.size: recording for recording in there if recording.steps}
    sizes = []
    found: dict[str, Difference] = {}
    for mine in here:
        if mine.steps and mine.size in by_size:
            sizes.append(mine.size)
            for difference in _differences(mine, by_size[mine.size]):
                found.setdefault(difference.what, difference)
    return Likeness(reference, sizes, list(found.values()), headline)


def _differences(mine: Recording, theirs: Recording) -> Iterator[Difference]:
    """Yield the differences between two runs on equally many ranks."""
    runs = (mine, theirs)
    facts = dict(FACTS)
    if all(map(came_to_end, runs)):
        facts.update(FACTS_OF_ENDED)
        if not any(map(short_epochs_of, runs)):
            facts.update(FACTS_OF_WHOLE)
    for what, (kind, read) in facts.items():
        here = [*map(read, mine.ranks)]
        there = [*map(read, theirs.ranks)]
        if len(here) != len(there) or any(map(_differ, here, there)):
            yield Difference(
                what=what,
                ranks=mine.size,
                here=_text(here),
                here_at=_line(mine, kind),
                there=_text(there),
                there_at=_line(theirs, kind),
            )


def _differ(here: str | float, there: str | float) -> bool:
    if isinstance(here, float) and isinstance(there, float):
        return max(here, there) > _TIMES * min(here, there)
    if _VARIOUS in (here, there):
        return False
    return _IN_BRACKETS.sub("", str(here)) != _IN_BRACKETS.sub("", str(there))


def _text(by_rank: Sequence[str | float]) -> str:
    """Return what holds on all ranks, else what holds on each."""
    texts = []
    for rank, value in enumerate(by_rank):
        text = f"{value:.3g}" if isinstance(value, float) else value
        if len(set(by_rank)) == 1:
            return text
        texts.append(f"rank {rank}: {text}")
    return "; ".join(texts)


def _line(recording: Recording, kind: type[AnyRecord]) -> str | None:
    """Return the first known line of records of a kind."""
    for record in recording.of(kind):
        at = getattr(record, "at", None)
        if at is not None and getattr(record, "name", None) not in SETUP:
            return str(at)
    return None


def _kinds(texts: Iterable[str]) -> str:
    return listed(sorted(set(texts))) or "none"


def _usual(texts: Sequence[str]) -> str:
    """Return the text of at least half of the cases, else what is not compared."""
    usual = mode(texts or ["none"])
    if 2 * texts.count(usual) < len(texts):
        return _VARIOUS
    return usual


def _of_each(
    kind: type[Kind],
    read: Callable[[Kind], str],
    combine: Callable[[list[str]], str] = _usual,
) -> Fact:
    """Return the fact that combines what is read of each record of a kind."""
    return kind, lambda rank: combine([*map(read, rank.of(kind))])


def _times(texts: Sequence[str]) -> str:
    return str(len(texts))


# --- forward and backward passes ---


def _modes(backward: Backward) -> str:
    return _kinds(map(str, map(attrgetter("mode"), backward.forwards)))


def _types(backward: Backward) -> str:
    return _kinds(map(listed, map(attrgetter("dtypes"), backward.forwards)))


def _through(backward: Backward) -> str:
    through = _kinds(map(_THROUGH.__getitem__, map(attrgetter("through"), backward.forwards)))
    if backward.synced is False:
        return f"{through} without averaging"
    return through


def _of_steps(read: Callable[[list[Backward]], str]) -> Fact:
    """Return the fact that is read of the backward passes of most steps."""

    def fact(rank: RankRecords) -> str:
        texts = []
        for _, passes in groupby(rank.of(Backward), attrgetter("step")):
            texts.append(read([*passes]))
        return _usual(texts)

    return Backward, fact


def _passes(passes: list[Backward]) -> str:
    """Return the rows that the model gets in a step, and in how many passes."""
    rows = 0
    for backward in passes:
        for forward in backward.forwards[:1]:
            rows += forward.samples or 0
    return f"{count(rows, 'row')} in {len(passes)} passes"


def _loss(passes: list[Backward]) -> str:
    """Return the kinds of losses, and how much they count together."""
    kinds = []
    weight = 0.0
    for backward in passes:
        if backward.loss is not None:
            kinds.append(f"{backward.loss.node.partition('Backward')[0]} {backward.loss.reduction}")
            weight += backward.loss.arriving
    return f"{_kinds(kinds)}, weight {weight:.3g}"


# --- updates ---


def _clips(step: Step) -> str:
    texts = []
    for clip in step.clips:
        texts.append(f"{clip.kind} to {clip.limit}")
        if step.scale != 1 and not clip.unscaled:
            texts[-1] += " of scaled gradients"
    return listed(texts) or "none"


def _rule(step: Step) -> str:
    """Return the class and the settings of an optimiser."""
    texts = [step.optimizer]
    for name, value in sorted(step.settings.items()):
        if value and not _NO_RULE.match(name):
            texts.append(f"{name} {value}")
    return " ".join(texts)


def _rates(rank: RankRecords) -> dict[int, list[str]]:
    """Return the learning rates of each optimiser in its steps."""
    series: dict[int, list[str]] = defaultdict(list)
    for step in rank.of(Step):
        series[step.optimizer_number].append(listed(map("{:.4g}".format, filter(None, step.lr))))
    return series


def _first_rates(rank: RankRecords) -> str:
    texts = []
    for rates in _rates(rank).values():
        texts.append(rates[0])
        soon = min(_SOON, len(rates) - 1)
        if rates[soon] != rates[0]:
            texts[-1] += f", {rates[soon]} after {count(soon, 'step')}"
    return _kinds(texts)


def _changes_of_rates(rank: RankRecords) -> str:
    constant = [len(set(rates)) == 1 for rates in _rates(rank).values()]
    return {True: "never", False: "yes"}[all(constant)]


def _update_size(rank: RankRecords) -> float:
    """Return by how much of their norm the first steps change the weights, as a median."""
    shares = []
    for before, after in pairwise(rank.of(Weights)[: _FIRST + 1]):
        weights = rank.numbers(before.values)
        updated = rank.numbers(after.values)
        same = after.optimizer_number == before.optimizer_number
        if same and after.step == before.step + 1 and len(weights) == len(updated):
            shares.append(float(np.linalg.norm(updated - weights) / np.linalg.norm(weights)))
    return float(np.median(shares or [0.0]))


def _held(rank: RankRecords) -> str:
    numbers = {}
    for record in rank.of(Parameters):
        for row in record.rows:
            numbers[row.tensor] = row.numel
    return f"{count(len(numbers), 'parameter')} of {count(sum(numbers.values()), 'number')}"


def _unchanged(rank: RankRecords) -> str:
    """Return how many parameters of the optimisers never change, and which."""
    seen: set[str] = set()
    changed: set[str] = set()
    for record in rank.of(Parameters):  # one that gets parameters later is left out
        widths = [min(row.numel, COORDINATES) for row in record.rows]
        every = []
        for weights in rank.of(Weights):
            values = rank.numbers(weights.values)
            if weights.optimizer_number == record.optimizer_number and len(values) == sum(widths):
                every.append(values)
        for row, column in zip(record.rows, side_by_side(widths), strict=True):
            if every:
                seen.add(row.name)
                if not np.array_equal(every[0][column], every[-1][column]):
                    changed.add(row.name)
    names = sorted(seen - changed)
    return f"{len(names)} ({listed(names, most=6) or 'all change'})"


# --- messages ---


def _messages(calls: Iterable[CollectiveCall]) -> str:
    """Return the kinds of calls, with the bytes of each kind: buckets do not count."""
    total: Counter[str] = Counter()
    for call in calls:
        if call.name not in SETUP:
            kind = " ".join(filter(None, [call.name.strip("_"), call.op, "of", call.content]))
            total[kind] += 0 if "object" in call.name else call.nbytes
    texts = []
    for kind, nbytes in sorted(total.items()):
        texts.append(f"{kind}, {bytes_text(nbytes)}")
    return listed(texts) or "none"


def _calls_in_steps(rank: RankRecords) -> str:
    steps: dict[int, list[CollectiveCall]] = {}
    for step in rank.of(Step):
        steps[step.step] = []
    for call in rank.of(CollectiveCall):
        steps.get(call.step, []).append(call)
    return _usual([*map(_messages, steps.values())])


# --- samples ---


def _draws(rank: RankRecords, *, train: bool) -> str:
    """Return how many samples the first epoch of each loader has."""
    texts = []
    for loader in loaders_of(rank, train=train):
        draws = 0
        for draw in loader.epochs[0].whole:
            draws += len(draw.innermost)
        texts.append(f"{draws:,} of a dataset of {loader.facts.length or 0:,}")
    return listed(texts) or "none"


def _evaluation(one: Evaluation) -> str:
    return f"in {one.mode} mode, with {_DRAWN[one.drew]} random numbers, in {listed(one.dtypes)}"


FACTS: Mapping[str, Fact] = {
    "mode of the model in training": _of_each(Backward, _modes, _kinds),
    "what runs the model": _of_each(Backward, _through, _kinds),
    "types in which the model computes": _of_each(Backward, _types, _kinds),
    "random numbers of the model in training": _of_each(RandomForward, lambda _: "new", _kinds),
    "rows of the model in a step": _of_steps(_passes),
    "losses of a step": _of_steps(_loss),
    "clipping in a step": _of_each(Step, _clips),
    "optimiser": _of_each(Step, _rule),
    "learning rate": (Step, _first_rates),
    "change of the weights in a step": (Step, _update_size),
    "parameters in optimisers": (Parameters, _held),
    "parameters that never change": (Step, _unchanged),
    "calls in a step": (CollectiveCall, _calls_in_steps),
}
"""By what they are about."""

FACTS_OF_ENDED: Mapping[str, Fact] = {
    "times that DDP is built": _of_each(DdpBuilt, str, _times),
    "evaluation": _of_each(Evaluation, _evaluation, _kinds),
    "content of files": _of_each(Saved, lambda saved: listed(saved.holds), _kinds),
    "changes of the learning rate": (Step, _changes_of_rates),
}
"""Those that are compared only if both programs came to their end."""

FACTS_OF_WHOLE: Mapping[str, Fact] = {
    "steps": (Step, lambda rank: float(len(rank.of(Step)))),
    "epochs": (Loader, lambda rank: str(len(rank.of(Trained)))),
    "samples of the first epoch": (Loader, partial(_draws, train=True)),
    "samples of the first evaluation": (Loader, partial(_draws, train=False)),
    "evaluations": _of_each(Evaluation, str, _times),
}
"""Those that are compared only if both came there with all their batches."""
