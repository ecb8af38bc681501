"""The findings of a report: sentences with evidence and limits, computed from the numbers alone.

``findings(block)`` lists them. They claim only what the data supports: no order if the intervals
overlap, no equal accuracies near chance, nothing about unfinished cells. A finder gets the block
and the measured rows on one number of nodes, and its sentences continue "On 4 nodes"; the finders
of ``_WHOLE`` and ``_PREDICTION`` get all measured rows. ``speed`` is the one answer to "fastest,
or tied?".
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

from common.data import DATASETS
from common.models import MODELS
from common.say import counts, factor_text, listed, percent
from common.utils.grouping import grouped
from lab.predict.event_model import HEADERS
from lab.report.causes import (
    EQUAL_SHARE,
    beside,
    busy,
    compared,
    decomposition,
    difference,
    whole,
    why,
)
from lab.report.losses import curves
from lab.report.view import (
    NOISY,
    CellRow,
    ComparisonGroup,
    Interval,
    Rows,
    interval_text,
    seconds_text,
    small_text,
    steady,
    tied,
)

SPEED, EQUAL = "Which is fastest", "Do all ranks get the mean gradient"
PAIRS = "Other pairs"
BOUND, REACH = "What takes the time", "Limits"
_ABOVE_IDEAL = 1.05  # an efficiency that no measuring error of a quiet machine reaches
_NEAR_CHANCE = 1.5  # times the accuracy of guessing
_FEW_STEPS = 200  # after which running averages follow the weights
_APART = 0.05  # of all samples: accuracies that differ by more
_SAME_LOSS = 1e-4  # of the loss: more than rounding makes of one batch
_WITHIN = 0.20  # of the measured step: a prediction that far off is near
_ELSEWHERE = " docs/examples/check_strategy.py tests a strategy alone, `lab audit` a whole script."
_PARTS = {
    "compute": "compute (data, forward, backward, update)",
    "messages": "communication on the wire",
    "own work": "what the strategy computes between its messages (compressing, adding, copying)",
    "exchange": "the exchange (messages and the strategy's own computing, not separated)",
    "wait": "waiting for slower ranks",
}


class ReportFinding(NamedTuple):
    """A sentence and the numbers it rests on.

    caution : a limit of what the numbers show; the page folds these into "Limits".
    wrong : the numbers contradict what a strategy claims; shown in red, before everything else.
    """

    topic: str  # the page groups findings by it
    text: str
    evidence: str = ""
    caution: bool = False
    wrong: bool = False


Found = Iterator[ReportFinding]
Finder = Callable[[ComparisonGroup, Rows], Found]


def findings(block: ComparisonGroup) -> list[ReportFinding]:
    """Return what the cells of ``block`` show, in reading order.

    What holds on several numbers of nodes is said once.
    """
    every = {nodes: block.at(nodes) for nodes in sorted({row.nodes for row in block.measured})}
    several = {nodes: rows for nodes, rows in every.items() if nodes > 1}
    whole = {0: block.measured}
    return [
        *_found(block, whole, _WHOLE),
        *_found(block, several, _ON_NODES),
        *_found(block, every, _LEARNED),
        *_found(block, whole, _PREDICTION),
    ]


def _found(block: ComparisonGroup, parts: Mapping[int, Rows], finders: Sequence[Finder]) -> Found:
    """Yield what each finder says about the rows on each number of nodes (0: all together)."""
    for find in finders:
        said = [(nodes, found) for nodes, rows in parts.items() for found in find(block, rows)]
        by_text = grouped((found.text, (nodes, found)) for nodes, found in said)
        for members in by_text.values():
            yield _joined(members, block)


def _joined(members: Sequence[tuple[int, ReportFinding]], block: ComparisonGroup) -> ReportFinding:
    """Return findings with the same text on these numbers of nodes (0: all together) as one."""
    numbers = [nodes for nodes, _ in members]
    _, first = members[0]
    if numbers == [0]:
        return first
    where = f"On {counts(numbers, block.place)}"
    if numbers == [1]:
        where = f"On one {block.alone}"
    evidence = first.evidence
    if len(members) > 1:
        evidence = "; ".join(
            f"on {nodes} {block.place}s: {finding.evidence}"
            for nodes, finding in members
            if finding.evidence
        )
    return first._replace(text=where + first.text, evidence=evidence)


def strategies(names: Sequence[str], *, of: int) -> str:
    """Return the names as a list; ``all 5 strategies`` if these are all of more than two."""
    if len(names) == of and of > 2:
        return f"all {of} strategies"
    return listed(names)


def timed(row: CellRow) -> str:
    """Return the time with its interval: ``0.421 s [0.415, 0.427]``."""
    return (
        f"{seconds_text(row.seconds, row.step)} s{interval_text(row.interval('seconds'), row.step)}"
    )


def named(row: CellRow) -> str:
    return row.sync if row.exact else f"{row.sync} (not exact)"


def _syncs(rows: Rows) -> list[str]:
    return [row.sync for row in rows]


def _each(shares: Mapping[str, float], digits: int = 0) -> list[str]:
    """Return each name with its share in percent."""
    return [f"{name} {percent(share, digits)}" for name, share in shares.items()]


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the smallest and the largest of some values as texts, or the only one."""
    low = text(min(values))
    high = text(max(values))
    return low if low == high else f"{low} to {high}"


_tenths = partial(percent, digits=1)


# --- do all ranks get the mean gradient ---


def mean_gradients(block: ComparisonGroup, rows: Rows) -> Found:
    """Say which strategies gave every rank the mean, which did not, and what was not checked."""
    yield from _what_is_wrong(rows)
    right = averaged(rows)
    if right:
        yield ReportFinding(
            EQUAL,
            f" with {right} every rank's optimiser got the mean of all ranks' gradients in the "
            "first step.",
            f"relative error of that mean: {_residues(rows)}",
        )
    yield from _what_is_unknown(block, rows)
    if right and block.nodes_beyond_one == [2]:
        yield ReportFinding(
            EQUAL,
            " a strategy that divides by a literal 2 is right by chance. Compare on 3 "
            f"{block.place}s as well.",
            caution=True,
        )


def _what_is_wrong(rows: Rows) -> Found:
    """Yield a finding for each strategy that does not compute what it claims."""
    for row in rows:
        seen = row.claim.seen
        if seen is None or seen.judgement.right:
            continue
        found = seen.judgement
        yield ReportFinding(
            EQUAL,
            f" {row.sync} claims to be exact, but does not give every rank the mean gradient: in "
            f"step {seen.step} {found.sentence}. {found.cure}",
            f"{found.finding}; {seen.evidence.rows}; residue {small_text(seen.evidence.residue)}",
            wrong=True,
        )
    for row in rows:
        if row.claim.unequal_ranks:
            yield ReportFinding(
                EQUAL,
                f" the ranks of {row.sync} ended with different weights, although {row.sync} "
                "claims to be exact.",
                wrong=True,
            )


def _what_is_unknown(block: ComparisonGroup, rows: Rows) -> Found:
    """Yield why strategies were not checked."""
    reasons = grouped((row.claim.why_not, row.sync) for row in rows if row.claim.why_not)
    elsewhere = "" if block.emulated_compute else _ELSEWHERE
    for reason, names in reasons.items():
        gives = "gives" if len(names) == 1 else "give"
        yield ReportFinding(
            EQUAL,
            f" whether {listed(names)} {gives} every rank the mean gradient was not checked: "
            f"{reason}.{elsewhere}",
            caution=True,
        )


def averaged(rows: Rows) -> str:
    """Name the strategies with which every rank got the mean; "" without any."""
    right = [row.sync for row in rows if row.claim.right]
    if len(right) == sum(row.exact for row in rows) > 2:
        return f"all {len(right)} exact strategies"
    return listed(right)


def _residues(rows: Rows) -> str:
    """Return the relative error of each right mean, and the step in which it was seen."""
    each = []
    for row in rows:
        seen = row.claim.seen
        if row.claim.right and seen:
            each.append(f"{row.sync} {small_text(seen.evidence.residue)} (step {seen.step})")
    return ", ".join(each)


# --- which is fastest ---


def speed(rows: Rows) -> str:
    """Say which of ``rows`` is fastest, as far as the intervals allow."""
    best = steady(rows)[0]
    if len(rows) == 1:
        return _speed_of_one(best)
    exact = [row for row in rows if row.exact]
    if best.exact or not exact:
        return _speed_of_several(rows)
    return f"{_speed_of_several(rows)}; of the exact strategies {speed(exact)}"


def a_step(row: CellRow) -> str:
    """Return what the compared time is of: an iteration without the first, or a step."""
    return "an iteration" if row.by_iterations else "a step"


def _speed_of_one(row: CellRow) -> str:
    text = f"{named(row)} takes {seconds_text(row.seconds, row.step)} s {a_step(row)}"
    if row.speedup:
        text += f", {factor_text(row.speedup)} times as fast as one {row.alone}"
    return text


def _speed_of_several(rows: Rows) -> str:
    """Say which is fastest, or that the intervals of several overlap."""
    known = [row.interval("seconds") is not None for row in rows]
    best, *others = tied(rows)
    most = whole(rows)
    shortest = seconds_text(best.seconds, best.step)
    ratio = f", {compared(most)}"
    if not all(known):
        ran = "not every strategy ran more than once" if any(known) else "each strategy ran once"
        return (
            f"{named(best)} has the shortest {a_step(best).partition(' ')[2]}, {shortest} s{ratio};"
            f" {ran}, so the order is not certain"
        )
    if not others:
        return f"{named(best)} is fastest: {shortest} s {a_step(best)}{ratio}"
    names = strategies([named(row) for row in (best, *others)], of=len(rows))
    seconds = [row.seconds for row in (best, *others)]
    between = _range(seconds, partial(seconds_text, scale=best.step))
    between = f"({between} s {a_step(best)}; their 95 % intervals overlap"
    if noise := list(filter(attrgetter("noisy"), (best, *others))):
        between += f"; the repeats of {listed(_syncs(noise))} differ too much"
    between += ")"
    if most.slower in others:
        return f"{names} cannot be told apart {between}"
    return f"{names} are fastest, and cannot be told apart {between}{ratio}"


def fastest(_: ComparisonGroup, rows: Rows) -> Found:
    """Name the fastest strategy; strategies that compute something else take no part."""
    right = sorted((row for row in rows if not row.claim.wrong), key=lambda row: row.seconds)
    if right:
        alone = [row.baseline for row in right[:1] if row.baseline is not None]
        evidence = "; ".join(f"{row.sync} {timed(row)}" for row in [*right, *alone])
        yield ReportFinding(SPEED, f" {speed(right)}.", evidence)


def pairs(_: ComparisonGroup, rows: Rows) -> Found:
    """Compare strategies that differ in little and are no step of the answer's chain."""
    right = [row for row in rows if not row.claim.wrong]
    if len(right) > 1:
        for gap in beside(right, decomposition(right)):
            yield ReportFinding(PAIRS, f" {difference(gap)}. {why(gap)}")


def slower_than_one(block: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells with a speed-up below 1."""
    what = "processing fewer samples a second" if block.weak else "slower"
    slower = [row for row in rows if row.speedup and row.speedup < 1]
    by_certainty = grouped((_how_certain(row.speedup_interval), row) for row in slower)
    for (certain, words), members in by_certainty.items():
        names = strategies(_syncs(members), of=len(rows))
        are = "is" if len(members) == 1 else "are"
        text = f" {names} {are} {what} than one {block.alone}{words}"
        evidence = "; ".join(
            f"{row.sync} {factor_text(row.speedup or 0.0)} times" for row in members
        )
        text += f" {_why_slower(members)}"
        yield ReportFinding(SPEED, text, evidence, caution=not certain)


def _why_slower(rows: Rows) -> str:
    """Say what a step of one rank and those of ``rows`` consist of, and what the ranks share."""
    first = rows[0]
    one = first.baseline or first
    alone = one.step - one.medians.sync
    compute = []
    exposed = []
    for row in rows:
        compute.append(row.step - row.medians.sync)
        exposed.append(row.medians.sync)
    text_of = partial(seconds_text, scale=one.step)
    text = (
        f"Of a step, compute takes {_range(compute, text_of)} s, with one {first.alone} "
        f"{text_of(alone)} s; exposed communication takes {_range(exposed, text_of)} s."
    )
    if any(row.cell.oversubscribed for row in rows):
        text += " The ranks share cores: they compute in turns."
    elif first.place == "rank" and first.cell.rate is None:
        text += " The ranks are on one machine: they share its cores, and memory is their network."
    return text


def _how_certain(speedup: Interval | None) -> tuple[bool, str]:
    """Return whether a speed-up is certainly below 1, and the words for it."""
    if speedup is None:
        return False, " by the medians; without intervals (one repeat) this is not certain."
    if speedup[1] < 1:
        return True, ", even at the favourable ends of both 95 % intervals."
    return False, " by the medians, but the 95 % intervals overlap."


def above_ideal(block: ComparisonGroup, rows: Rows) -> Found:
    """Warn of speed-ups that are larger than the number of nodes."""
    above = {}
    for row in rows:
        efficiency = row.efficiency
        if efficiency is not None and efficiency > _ABOVE_IDEAL:
            above[row.sync] = efficiency
    if above:
        one = f"one {block.alone}"
        yield ReportFinding(
            SPEED,
            f" the efficiency is above the ideal 100 % ({listed(_each(above))}). The run on {one} "
            "was disturbed, or it is slower for each sample (fewer threads, less cache). Do not "
            f"trust these speed-ups: run {one} again on a quiet machine.",
            "; ".join(_each(above, 1)),
            caution=True,
        )


# --- what takes the time ---


def bounds(_: ComparisonGroup, rows: Rows) -> Found:
    """Say what takes the largest part of a step: compute, communication or waiting."""
    members: dict[str, list[str]] = {part: [] for part in _PARTS}
    shares = []
    for row in rows:
        seconds = step_parts(row)
        largest = max(seconds, key=seconds.__getitem__)
        members[largest].append(row.sync)
        share = seconds[largest] / sum(seconds.values())
        shares.append(f"{row.sync} {percent(share)} {largest}")
    texts = [
        f"{label} with {strategies(members[part], of=len(rows))}"
        for part, label in _PARTS.items()
        if members[part]
    ]
    yield ReportFinding(
        BOUND, f" the largest part of a step is {'; '.join(texts)}.", "; ".join(shares)
    )


def step_parts(row: CellRow) -> dict[str, float]:
    """Return the seconds of those of ``_PARTS`` that are known, which add up to the sections."""
    medians = row.medians
    compute = sum((medians.data, medians.forward, medians.backward, medians.update))
    parts = {"compute": compute, "wait": medians.wait}
    if row.own_work is None:
        return parts | {"exchange": medians.wire}
    return parts | {"messages": medians.wire - row.own_work, "own work": row.own_work}


def stragglers(_: ComparisonGroup, rows: Rows) -> Found:
    """Name the strategies that wait longer for slower ranks than the rest of their sync takes."""
    for row in rows:
        medians = row.medians
        if medians.wait <= medians.wire:
            continue
        wait = row.interval("wait")
        wire = row.interval("wire")
        end = "; it ran once, so this is not certain."
        certain = wait is not None and wire is not None and wait[0] > wire[1]
        if certain:
            end = ". A faster network would save less than half of the exposed time."
        elif wait is not None:
            end = ", but the 95 % intervals overlap."
        yield ReportFinding(
            BOUND,
            f" {row.sync}: ranks wait longer for slower ranks than the exchange takes{end}",
            f"waiting {seconds_text(medians.wait, row.step)} s, exchange "
            f"{seconds_text(medians.wire, row.step)} s",
            caution=not certain,
        )


def root_share(block: ComparisonGroup, rows: Rows) -> Found:
    """Compare rank 0's share of all bytes sent with an equal share; or node 0's, of all links."""
    shares: dict[str, float] = {}
    planned = []
    for row in rows:
        if row.root_share is not None:
            shares[row.sync] = row.root_share
            if not row.counted:
                planned.append(row.sync)
    if len(shares) < len(rows):
        yield ReportFinding(
            "Bytes",
            f" the bytes of {listed([sync for sync in _syncs(rows) if sync not in shares])} were "
            "not counted, and no plan is known here: add --timeline to the runs.",
            caution=True,
        )
    if shares:
        text = _shares_text(shares, equal=1 / rows[0].nodes, every=len(shares) == len(rows))
        if planned:
            text += f" By the plan, not counted: {listed(planned)}."
        root = "rank 0" if block.ranks_per_node == 1 else "node 0"
        yield ReportFinding("Bytes", f" {root} {text}", "; ".join(_each(shares, 1)))


def _shares_text(shares: Mapping[str, float], *, equal: float, every: bool) -> str:
    """Say whether rank 0 sends more than an equal share. every : of all strategies."""
    heavy = [sync for sync, share in shares.items() if share > EQUAL_SHARE * equal]
    text = f"sends about its share with {listed(list(shares))}"
    if heavy:
        text = f"sends more than its share with {listed(heavy)}"
    elif every:
        text = "sends about its share with any strategy"
    most = max(shares, key=shares.__getitem__)
    text += f": up to {percent(shares[most], 1)} of all bytes"
    if len(heavy) > 1:
        text += f" ({most})"
    return f"{text}; an equal share would be {percent(equal, 1)}."


# --- what was learned, also on one rank ---


def accuracies(block: ComparisonGroup, rows: Rows) -> Found:
    """Compare the accuracies on the test images; near chance they show nothing."""
    reached = {row: values for row in rows if (values := row.recorded("test_accuracy"))}
    evidence = "; ".join(f"{row.sync} {_spread(values)}" for row, values in reached.items())
    classes = block.settings.num_classes
    if classes is None and block.settings.dataset in DATASETS:
        classes = DATASETS[block.settings.dataset].classes
    limit = math.inf  # no accuracy is known to be above chance
    chance = "cannot be compared with guessing: the number of classes is unknown."
    if classes:
        limit = _NEAR_CHANCE / classes
        chance = (
            f"is near chance (at most {percent(limit, 1)} with {classes} classes). Equal "
            "accuracies there show nothing: train longer, or with a smaller learning rate."
        )
    near = []
    above = {}
    for row, values in reached.items():
        if fmean(values) <= limit:
            near.append(row)
        else:
            above[row] = values
    if near:
        yield ReportFinding(
            "Accuracy", f" the test accuracy{_of(near)} {chance}", evidence, caution=True
        )
    yield from _above_chance(above, evidence)
    yield from _beside_training(reached)


def _beside_training(rows: Iterable[CellRow]) -> Found:
    """Say why accuracies of training and test differ after few steps."""
    apart = []
    for row in rows:
        trained = row.mean("train_accuracy")
        tested = row.mean("test_accuracy")
        few = max(step for run in row.runs for step, _ in run.losses or [(0, None)]) <= _FEW_STEPS
        if trained is not None and tested is not None and few and trained - tested > _APART:
            apart.append(f"{row.sync} {percent(trained, 1)} and {percent(tested, 1)}")
    if apart:
        yield ReportFinding(
            "Accuracy",
            f" the accuracy of the last step's batch lies above that of the test ({listed(apart)})."
            " In training BatchNorm normalises with the batch's own statistics, in the test with "
            "running averages, which lag behind the weights in the first steps. After few steps "
            "the two cannot be compared.",
            caution=True,
        )


def losses_by_shard(block: ComparisonGroup, rows: Rows) -> Found:
    """Say why the first loss of several ranks is not that of one rank, with the same batch."""
    if block.weak or block.settings.model not in MODELS:  # which all have BatchNorm
        return
    alone = curves([block.baseline] if block.baseline else [])
    first = next(iter(alone.values()), {}).get(1)
    for sync, losses in curves([row for row in rows if row.exact]).items():
        own = losses.get(1)
        if first is None or own is None or abs(own - first) <= _SAME_LOSS * abs(first):
            continue
        yield ReportFinding(
            "Loss",
            f" the loss of step 1 is {own:.4f} with {sync} and {first:.4f} with one "
            f"{block.alone}, for the same weights and samples. BatchNorm normalises over the shard "
            "of each rank, not over the whole batch; --sync-batchnorm on makes them equal.",
        )
        return


def _above_chance(reached: Mapping[CellRow, Sequence[float]], evidence: str) -> Found:
    """Compare the accuracies of strategies that learned something."""
    exact = [row for row in reached if row.exact]
    values = [value for row in exact for value in reached[row]]
    if not values:
        return
    text = f" the test accuracy{_of(exact)} is {_range(values, _tenths)}."
    if min(map(len, reached.values())) < 2:
        text += " Each ran once, so small differences show nothing."
    yield ReportFinding("Accuracy", text, evidence)
    mean = percent(fmean(values), 1)
    for row, own in reached.items():
        if row.exact:
            continue
        yield ReportFinding(
            "Accuracy",
            f" {row.sync}, which does not claim to be exact, reaches {percent(fmean(own), 1)}; "
            f"the exact strategies {_range(values, _tenths)}.",
            f"{row.sync} {_spread(own)}; the exact mean {mean}",
        )


def _of(rows: Rows) -> str:
    """Return whose accuracy it is; one rank has no strategy."""
    return f" of {listed(_syncs(rows))}" if rows[0].nodes > 1 else ""


def _spread(values: Sequence[float]) -> str:
    mean = percent(fmean(values), 1)
    if len(values) == 1:
        return mean
    return f"{mean} ({_range(values, _tenths)}, {len(values)} repeats)"


def time_to_accuracy(block: ComparisonGroup, rows: Rows) -> Found:
    """Say how many seconds of training each strategy needed to reach the required accuracy."""
    target = block.settings.until_accuracy
    if target:
        for row in rows:
            yield _time_to(target, row)


def _time_to(target: float, row: CellRow) -> ReportFinding:
    """Say how many of a cell's runs reached the accuracy, and after how much training."""
    tried = len(row.runs)
    times = row.recorded("seconds_to_accuracy")
    steps = row.recorded("steps_to_accuracy")
    who = row.sync if row.nodes > 1 else "a run"
    if not times:
        return ReportFinding(
            "Accuracy",
            f" {who} did not reach {percent(target)} in any of {tried} runs.",
            caution=True,
        )
    reached = len(times)
    spread = "one run"
    if reached > 1:
        spread = f"{min(times):.1f} to {max(times):.1f} s over {reached} runs"
    text = f" {who} reached {percent(target)} after {median(times):.1f} s of training ({spread})"
    if reached < tried:
        text += f"; {tried - reached} of {tried} runs did not reach it"
    each = ", ".join(f"{seconds:.1f}" for seconds in times)
    counted = ", ".join(map(str, steps)) or "not recorded"
    return ReportFinding("Accuracy", f"{text}.", f"seconds {each}; steps {counted}")


# --- limits ---


def unfinished(block: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells that failed, are pending, or have fewer repeats than planned."""
    for status, text in (
        ("failed", "Failed and left out of every comparison"),
        ("pending", "Not run yet"),
        ("partial", "Only partly done, with fewer good repeats than planned"),
    ):
        names = [row.name for row in block.rows if row.cell.status == status]
        if names:
            yield ReportFinding(
                REACH,
                f"{text}: {listed(names)}.",
                f"{len(names)} of {len(block.rows)} cells",
                caution=True,
            )


def noisy(_: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells whose repeats differ too much for a conclusion."""
    wide = {row.name: timed(row) for row in rows if row.noisy}
    if wide:
        yield ReportFinding(
            REACH,
            f"The repeats of {listed(list(wide))} differ so much that the 95 % interval is wider "
            f"than {percent(NOISY)} of the step. Run more repeats, or use a machine that does "
            "nothing else.",
            "; ".join(f"{name}: {step}" for name, step in wide.items()),
            caution=True,
        )


# --- predictions ---


def predictions(_: ComparisonGroup, rows: Rows) -> Found:
    """Say how many predicted step times lie within 20 % of the measured ones."""
    errors = {
        row: row.error
        for row in rows
        if row.prediction and row.prediction.in_scope and row.error is not None
    }
    if not errors:
        return
    texts = {row: f"{row.name}: {percent(error, 1, signed=True)}" for row, error in errors.items()}
    far = [texts[row] for row, error in errors.items() if abs(error) > _WITHIN]
    worst = max(errors, key=lambda row: abs(errors[row]))
    text = (
        f"{len(errors) - len(far)} of {len(errors)} predictions in scope lie within "
        f"{percent(_WITHIN)} of the measured step time; the largest error is that of "
        f"{texts[worst]}."
    )
    if far:
        text += f" Outside are {listed(far)}."
    disturbed = [row.name for row in errors if busy(row)]
    if disturbed:
        text += f" The machine was busy during {listed(disturbed)}, which no prediction knows."
    yield ReportFinding("Prediction", text, "; ".join(texts.values()), caution=bool(far))


def bytes_as_predicted(_: ComparisonGroup, rows: Rows) -> Found:
    """Say whether the bytes that each rank counted equal the formulas."""
    compared = 0
    differing = {}
    for row in rows:
        if row.nodes == 1 or row.prediction is None:
            continue
        formula = row.prediction.bytes_sent
        counted = row.per_rank("bytes_sent")
        if not formula or not counted:
            continue
        compared += 1
        if not _agree(formula, counted):
            whole = f"formula {list(map(round, formula))}, counted {list(map(round, counted))}"
            differing[row.name] = whole
    if differing:
        first = next(iter(differing))
        yield ReportFinding(
            "Prediction",
            f"The counted bytes differ from the formulas with {'; '.join(differing)}.",
            f"{first}: {differing[first]}",
            caution=True,
        )
    elif compared:
        cells = "the one cell that has both" if compared == 1 else f"all {compared} cells"
        yield ReportFinding(
            "Prediction",
            f"Every rank sent as many bytes as the formulas say, in {cells}.",
            "compared for each rank and step, to half a byte",
        )


def links_as_planned(_: ComparisonGroup, rows: Rows) -> Found:
    """Say whether the kernel counted the bytes of the plans on the links of emulated nodes."""
    excess = {}
    for row in rows:
        planned = row.prediction.link_bytes if row.prediction is not None else []
        if row.exact and planned and row.link_bytes:
            pairs = zip(chain(*planned), chain(*row.link_bytes), strict=True)
            shares = [counted / plan - 1 for plan, counted in pairs if plan]
            excess[row.name] = max(shares, key=abs)
    if not excess:
        return
    texts = {name: f"{name} {percent(share, 2, signed=True)}" for name, share in excess.items()}
    far = [texts[name] for name, share in excess.items() if not -0.01 < share < HEADERS - 1]
    text = (
        "On the nodes' links the kernel counted the bytes of the strategies' plans and at most "
        f"{percent(max(excess.values()), 1)} more, the headers of TCP, IP and Ethernet."
    )
    if far:
        text = (
            "On the nodes' links the kernel counted other bytes than the strategies' plans and "
            f"headers: {listed(far)}. Messages were sent twice, or others passed the link."
        )
    yield ReportFinding("Prediction", text, "; ".join(texts.values()), caution=bool(far))


def _agree(formula: Sequence[float], counted: Sequence[float]) -> bool:
    """Return whether the bytes of each rank are equal, to half a byte."""
    if len(formula) != len(counted):
        return False
    pairs = zip(formula, counted, strict=True)
    return all(abs(expected - found) <= 0.5 for expected, found in pairs)


_WHOLE = (unfinished, noisy)
_ON_NODES = (
    *(mean_gradients, fastest, pairs, slower_than_one, above_ideal),
    *(bounds, stragglers, root_share, losses_by_shard),
)
_LEARNED = (accuracies, time_to_accuracy)
_PREDICTION = (predictions, bytes_as_predicted, links_as_planned)
