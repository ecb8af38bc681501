"""The findings of a report: sentences with evidence and limits, computed from the numbers alone.

``findings(block)`` lists them. They claim only what the data supports: no order if the intervals
overlap, no equal accuracies near chance, nothing about unfinished cells. A finder gets the block
and the measured rows on one number of nodes, and its sentences continue "On 4 nodes"; the finders
of ``_WHOLE`` and ``_PREDICTION`` get all measured rows. ``speed`` is the one answer to "fastest,
or tied?".
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from common.data import DATASETS
from common.utils.grouping import grouped
from lab.report.equality import DDP, GROWTH, STEPS, Deviation, check
from lab.report.losses import Difference, curves, differences
from lab.report.view import (
    CellRow,
    ComparisonGroup,
    Rows,
    interval_text,
    listed,
    percent,
    seconds_text,
    small_text,
)

SPEED, EQUAL = "Which is fastest", "Do they compute the same"
ITERATION = "Mean iteration time"
BOUND, REACH = "What takes the time", "Limits"
_NOISY = 0.5  # of the step: a wider interval gets a warning
EQUAL_SHARE = 1.2  # report a rank 0 that sends more than this many times an equal share
_ABOVE_IDEAL = 1.05  # an efficiency that no measuring error of a quiet machine reaches
_NEAR_CHANCE = 1.5  # times the accuracy of guessing
_WITHIN = 0.20  # of the measured step: a prediction that far off is near
ONE_PROCESS = "one process on the same batches"
_ELSEWHERE = " docs/examples/check_strategy.py tests a strategy alone, `lab audit` a whole script."
_PARTS = {
    "compute": "compute (data, forward, backward, update)",
    "wire": "communication on the wire",
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


def findings(block: ComparisonGroup) -> list[ReportFinding]:
    """Return what the cells of ``block`` show, in reading order.

    What holds on several numbers of nodes is said once.
    """
    every = {nodes: block.at(nodes) for nodes in sorted({row.nodes for row in block.measured})}
    several = {nodes: rows for nodes, rows in every.items() if nodes > 1}
    whole = {0: block.measured}
    plan = ((whole, _WHOLE), (several, _ON_NODES), (every, _LEARNED), (whole, _PREDICTION))
    found: list[ReportFinding] = []
    for parts, finders in plan:
        for find in finders:
            said = [(nodes, one) for nodes, rows in parts.items() for one in find(block, rows)]
            found += map(_joined, grouped((one.text, (nodes, one)) for nodes, one in said).values())
    return found


def _joined(members: Sequence[tuple[int, ReportFinding]]) -> ReportFinding:
    """Return findings with the same text on these numbers of nodes (0: all together) as one."""
    numbers, first = [nodes for nodes, _ in members], members[0][1]
    if numbers == [0]:
        return first
    each = "; ".join(f"on {nodes} nodes: {one.evidence}" for nodes, one in members if one.evidence)
    evidence = each if len(members) > 1 else first.evidence
    where = "On one node" if numbers == [1] else f"On {listed(list(map(str, numbers)))} nodes"
    return first._replace(text=where + first.text, evidence=evidence)


def strategies(names: Sequence[str], *, of: int) -> str:
    """Return the names as a list; ``all 5 strategies`` if these are all of more than two."""
    return f"all {of} strategies" if len(names) == of > 2 else listed(names)


def timed(row: CellRow) -> str:
    """Return the step's median with its interval: ``0.421 s [0.415, 0.427]``."""
    return f"{seconds_text(row.step, row.step)} s{interval_text(row)}"


def named(row: CellRow) -> str:
    return row.sync if row.exact else f"{row.sync} (not exact)"


def times_text(value: float) -> str:
    """Return ``3.2 times``; two decimals below 2, where the first one says little."""
    return f"{value:.2f} times" if value < 2 else f"{value:.1f} times"


def _each(values: dict[str, float], digits: int = 0) -> list[str]:
    return [f"{name} {percent(value, digits)}" for name, value in values.items()]


# --- do they compute the same ---


def equal_results(block: ComparisonGroup, rows: Rows) -> Found:
    """Say which strategies compute the same, which one is wrong, and what was not comparable."""
    result = check(block, rows[0].nodes)
    others = "ddp, PyTorch's own," if set(result.equal) == {DDP} else "the others"
    several = len(result.equal) > 1
    wrong = [
        f" {sync} is not equal to {ONE_PROCESS if sync in result.mistakes else others} "
        f"{_how_far(deviation)}. It claims to be exact, but does not compute the mean gradient"
        f"{': ' if result.mistakes.get(sync) else '.'}{result.mistakes.get(sync, '')}"
        for sync, deviation in result.wrong.items()
    ]
    if result.disputed:
        wrong.append(
            f" {listed(sorted(result.disputed))} do not compute the same "
            f"{_how_far(min(result.disputed.values()))}. At least one of them is wrong; a "
            f"comparison with ddp shows which.{_ELSEWHERE}"
        )
    wrong += [
        f" the ranks of {sync} ended with different weights, although {sync} claims to be exact."
        for sync in result.unequal_ranks
    ]
    evidence = f"equal to each other: {listed(result.equal)}" if several else ""
    yield from (ReportFinding(EQUAL, text, evidence, wrong=True) for text in wrong)
    if found := differences(curves([row for row in rows if row.sync in result.equal])):
        yield _equal(found, result.equal, of=sum(row.exact for row in rows))
    elif right := [sync for sync in result.equal if sync in result.confirmed]:
        yield ReportFinding(EQUAL, f" {listed(right)}: equal to {ONE_PROCESS}.")
    reasons = grouped((why, sync) for sync, why in result.untested.items())
    limits = [
        f" the losses cannot show whether {listed(names)} compute{'s' if len(names) == 1 else ''} "
        f"the mean gradient: {reason}."
        f"{'' if block.emulated_compute else _ELSEWHERE}"
        for reason, names in reasons.items()
    ]
    if (several or result.confirmed) and block.nodes_beyond_one == [2]:
        limits.append(
            " a strategy that divides by a literal 2 is right by chance. Compare on 3 nodes as "
            "well."
        )
    yield from (ReportFinding(EQUAL, text, caution=True) for text in limits)


def _how_far(deviation: Deviation) -> str:
    step, value, limit = deviation
    far = f"by {small_text(value)}" if math.isfinite(value) else "and is not finite"
    return (
        f"from step {step} on: the loss differs {far}; rounding would give less than "
        f"{small_text(limit, 1)} at that step"
    )


def _equal(found: Sequence[Difference], equal: Sequence[str], *, of: int) -> ReportFinding:
    everyone = f"all {of} strategies that claim to be exact"
    who = everyone if len(equal) == of > 2 else listed(equal)
    first = max((entry.value for entry in found if entry.step <= STEPS[-1]), default=0.0)
    most = max(found, key=lambda entry: entry.value)
    largest = f"{small_text(most.value)} at step {most.step}"
    text = (
        f"up to step {STEPS[-1]} their losses differ by {small_text(first)} at most. Rounding does "
        f"that: it grows up to {GROWTH:.0f} times from one step to the next."
        if most.value
        else "their losses are equal at every step, to the last digit."
    )
    grown = f" The largest difference is {largest}."
    return ReportFinding(
        EQUAL,
        f" {who} compute the same: {text}{grown if most.value > first else ''}",
        f"{largest}, {most.one} against {most.other}, loss {most.loss:.3f}; {listed(equal)}",
    )


# --- which is fastest ---


def speed(rows: Rows) -> str:
    """Say which of ``rows`` is fastest, as far as the intervals allow."""
    rows = sorted(rows, key=lambda row: row.step)
    best, last, exact = rows[0], rows[-1], [row for row in rows if row.exact]
    shortest = seconds_text(best.step, best.step)
    if len(rows) == 1:
        alone = f", {times_text(best.speedup)} as fast as one node" if best.speedup else ""
        return f"{named(best)} takes {shortest} s a step{alone}"
    ratio = f", {times_text(last.step / best.step)} as fast as {last.sync}"
    of_exact = f"; of the exact strategies {speed(exact)}" if exact and not best.exact else ""
    sure = [(row, ends) for row in rows if (ends := row.interval("step"))]
    if len(sure) < len(rows):
        ran = "not every strategy ran more than once" if sure else "each strategy ran once"
        return (
            f"{named(best)} has the shortest step, {shortest} s{ratio}; {ran}, so the order is not "
            f"certain{of_exact}"
        )
    tied = [row for row, (low, _) in sure if low <= sure[0][1][1]]
    if len(tied) == 1:
        return f"{named(best)} is fastest: {shortest} s a step{ratio}{of_exact}"
    noisy = any(map(_is_noisy, tied))
    why = "): their repeats differ too much" if noisy else "; their 95 % intervals overlap)"
    more = "" if last in tied else "are fastest, and "
    return (
        f"{strategies([named(row) for row in tied], of=len(rows))} {more}cannot be told apart "
        f"({shortest} to {seconds_text(tied[-1].step, best.step)} s{why}{ratio if more else ''}"
        f"{of_exact}"
    )


def fastest(block: ComparisonGroup, rows: Rows) -> Found:
    """Name the fastest strategy; strategies that compute something else take no part."""
    wrong = check(block, rows[0].nodes).doubtful
    right = sorted((row for row in rows if row.sync not in wrong), key=lambda row: row.step)
    if right:
        evidence = "; ".join(f"{row.sync} {timed(row)}" for row in right)
        yield ReportFinding(SPEED, f" {speed(right)}.", evidence)


def iterations(_: ComparisonGroup, rows: Rows) -> Found:
    """Give the assignment's numbers: mean iteration times and the speed-ups by them."""
    means = {row: mean for row in rows if (mean := row.mean_iteration) is not None}
    most = max((row.nodes for row in means), default=0)
    texts = [
        f"{row.name if row.nodes > 1 else 'one node'} {seconds_text(mean, mean)} s"
        + (f" (speed-up {row.speedup:.2f})" if row.speedup and row.nodes > 1 else "")
        for row, mean in means.items()
        if row.nodes in (1, most)
    ]
    if texts:
        yield ReportFinding(
            ITERATION, f"The mean iteration time without the first iteration: {listed(texts)}."
        )


def slower_than_one(block: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells with a speed-up below 1."""
    what = "slower" if not block.weak else "processing fewer samples a second"
    slower = grouped(
        (_how_certain(row.speedup_interval), row) for row in rows if row.speedup and row.speedup < 1
    )
    for certain, members in slower.items():
        names = strategies([row.sync for row in members], of=len(rows))
        are = "is" if len(members) == 1 else "are"
        yield ReportFinding(
            SPEED,
            f" {names} {are} {what} than one node{certain}",
            "; ".join(f"{row.sync} {row.speedup:.2f} times" for row in members),
            caution="even" not in certain,
        )


def _how_certain(speedup: tuple[float, float] | None) -> str:
    if speedup is None:
        return " by the medians; without intervals (one repeat) this is not certain."
    if speedup[1] < 1:
        return ", even at the favourable ends of both 95 % intervals."
    return " by the medians, but the 95 % intervals overlap."


def above_ideal(_: ComparisonGroup, rows: Rows) -> Found:
    """Warn of speed-ups that are larger than the number of nodes."""
    if above := {
        row.sync: row.efficiency for row in rows if row.efficiency and row.efficiency > _ABOVE_IDEAL
    }:
        yield ReportFinding(
            SPEED,
            f" the efficiency is above the ideal 100 % ({listed(_each(above))}). The run on one "
            "node was disturbed, or it is slower for each sample (fewer threads, less cache). Do "
            "not trust these speed-ups: run one node again on a quiet machine.",
            "; ".join(_each(above, 1)),
            caution=True,
        )


# --- what takes the time ---


def bounds(_: ComparisonGroup, rows: Rows) -> Found:
    """Say what takes the largest part of a step: compute, communication or waiting."""
    parts = {
        row.sync: {
            "compute": sum(map(row.seconds, ("data", "forward", "backward", "update"))),
            "wire": row.seconds("wire"),
            "wait": row.seconds("wait"),
        }
        for row in rows
        if row.median("wait") is not None
    }
    largest = {sync: max(found, key=found.__getitem__) for sync, found in parts.items()}
    members = grouped((part, sync) for sync, part in largest.items())
    texts = [
        f"{label} with {strategies(members[part], of=len(rows))}"
        for part, label in _PARTS.items()
        if part in members
    ]
    shares = (
        f"{sync} {percent(found[largest[sync]] / sum(found.values()))} {largest[sync]}"
        for sync, found in parts.items()
    )
    if texts:
        yield ReportFinding(
            BOUND,
            f" the largest part of the median step is {'; '.join(texts)}.",
            "; ".join(shares),
        )


def stragglers(_: ComparisonGroup, rows: Rows) -> Found:
    """Compare the time spent waiting for slower ranks with the time of the communication."""
    rows = [row for row in rows if row.median("wait") is not None]
    evidence = "; ".join(
        f"{row.sync} waiting {seconds_text(row.seconds('wait'), row.step)} s, "
        f"on the wire {seconds_text(row.seconds('wire'), row.step)} s"
        for row in rows
    )
    late = grouped(
        ((row.interval("wait") or (0, 0))[0] > (row.interval("wire") or (0, 0))[1], row.sync)
        for row in rows
        if row.seconds("wait") > row.seconds("wire")
    )
    for sure, names in late.items():
        yield ReportFinding(
            BOUND,
            f" {listed(names)}: ranks wait longer for slower ranks than sending takes"
            + (
                ". A faster network would save less than half of the exposed time."
                if sure
                else ", but the 95 % intervals overlap."
            ),
            evidence,
            caution=not sure,
        )
    if rows and not late:
        yield ReportFinding(
            BOUND, " no strategy waits longer for slower ranks than sending takes.", evidence
        )


def root_share(_: ComparisonGroup, rows: Rows) -> Found:
    """Compare rank 0's share of all bytes sent with an equal share."""
    shares = {row.sync: share for row in rows if (share := row.root_share) is not None}
    uncounted = [row.sync for row in rows if row.sync not in shares]
    if uncounted:
        yield ReportFinding(
            "Bytes",
            f" the bytes of {listed(uncounted)} were not counted: add --timeline to the runs.",
            caution=True,
        )
    if shares:
        equal, most = 1 / rows[0].nodes, max(shares, key=shares.__getitem__)
        heavy = [sync for sync, share in shares.items() if share > EQUAL_SHARE * equal]
        who = listed(heavy or list(shares)) if heavy or uncounted else "any strategy"
        yield ReportFinding(
            "Bytes",
            f" rank 0 {'sends more than its share' if heavy else 'sends about its share'} with "
            f"{who}: up to {percent(shares[most], 1)} of all bytes"
            f"{f' ({most})' if len(heavy) > 1 else ''}; an equal share would be "
            f"{percent(equal, 1)}.",
            "; ".join(_each(shares, 1)),
        )


# --- what was learned, also on one node ---


def accuracies(block: ComparisonGroup, rows: Rows) -> Found:
    """Compare the accuracies on the test images; near chance they show nothing."""
    reached = {row: values for row in rows if (values := _recorded(row, "test_accuracy"))}
    evidence = "; ".join(f"{row.sync} {_spread(values)}" for row, values in reached.items())
    classes, dataset = block.settings.get("num_classes"), block.settings.get("dataset")
    if not classes and dataset in DATASETS:
        classes = DATASETS[dataset].classes
    limit = _NEAR_CHANCE / classes if classes else math.inf
    near = [row for row, values in reached.items() if fmean(values) <= limit]
    if near:
        chance = (
            f"is near chance (at most {percent(limit, 1)} with {classes} classes). Equal "
            "accuracies there show nothing: train longer, or with a smaller learning rate."
            if classes
            else "cannot be compared with guessing: the number of classes is unknown."
        )
        yield ReportFinding(
            "Accuracy",
            f" the test accuracy{_of(near)} {chance}",
            evidence,
            caution=True,
        )
    above = [row for row in reached if row not in near]
    right = [row for row in above if row.exact]
    if exact := [value for row in right for value in reached[row]]:
        once = min(len(reached[row]) for row in above) < 2
        yield ReportFinding(
            "Accuracy",
            f" the test accuracy{_of(right)} is {_between(exact)}."
            f"{' Each ran once, so small differences show nothing.' if once else ''}",
            evidence,
        )
        for row in (row for row in above if not row.exact):
            yield ReportFinding(
                "Accuracy",
                f" {row.sync}, which does not claim to be exact, reaches "
                f"{percent(fmean(reached[row]), 1)}; the exact strategies {_between(exact)}.",
                f"{row.sync} {_spread(reached[row])}; the exact mean {percent(fmean(exact), 1)}",
            )


def _of(rows: Rows) -> str:
    return f" of {listed([row.sync for row in rows])}" if rows[0].nodes > 1 else ""


def _recorded(row: CellRow, name: str) -> list[float]:
    """Return ``name`` of the repeats that have it."""
    return [run[name] for run in row.runs if run.get(name) is not None]


def _between(values: Sequence[float]) -> str:
    low, high = percent(min(values), 1), percent(max(values), 1)
    return low if low == high else f"{low} to {high}"


def _spread(values: Sequence[float]) -> str:
    several = f" ({_between(values)}, {len(values)} repeats)" if len(values) > 1 else ""
    return percent(fmean(values), 1) + several


def time_to_accuracy(block: ComparisonGroup, rows: Rows) -> Found:
    """Say how many seconds of training each strategy needed to reach the required accuracy."""
    target = block.settings.get("until_accuracy") or 0.0
    for row in rows if target else ():
        times, tried = _recorded(row, "seconds_to_accuracy"), len(row.runs)
        who, reached = row.sync if row.nodes > 1 else "a run", len(times)
        if not times:
            yield ReportFinding(
                "Accuracy",
                f" {who} did not reach {percent(target)} in any of {tried} runs.",
                caution=True,
            )
            continue
        spread = f"{min(times):.1f} to {max(times):.1f} s over {reached} runs"
        missed = f"; {tried - reached} of {tried} runs did not reach it" if tried > reached else ""
        steps = ", ".join(map(str, _recorded(row, "steps_to_accuracy"))) or "not recorded"
        yield ReportFinding(
            "Accuracy",
            f" {who} reached {percent(target)} after {median(times):.1f} s of training "
            f"({spread if reached > 1 else 'one run'}){missed}.",
            f"seconds {', '.join(f'{time:.1f}' for time in times)}; steps {steps}",
        )


# --- limits ---


def unfinished(block: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells that failed, are pending, or have fewer repeats than planned."""
    for status, text in (
        ("failed", "failed and left out of every comparison"),
        ("pending", "not run yet"),
        ("partial", "only partly done, with fewer good repeats than planned"),
    ):
        if names := [row.name for row in block.rows if row.status == status]:
            yield ReportFinding(
                REACH,
                f"{text[0].upper()}{text[1:]}: {listed(names)}.",
                f"{len(names)} of {len(block.rows)} cells",
                caution=True,
            )


def noisy(_: ComparisonGroup, rows: Rows) -> Found:
    """Name the cells whose repeats differ too much for a conclusion."""
    if wide := list(filter(_is_noisy, rows)):
        yield ReportFinding(
            REACH,
            f"The repeats of {listed([row.name for row in wide])} differ so much that the 95 % "
            f"interval is wider than {percent(_NOISY)} of the step. Run more repeats, or use a "
            "machine that does nothing else.",
            "; ".join(f"{row.name}: {timed(row)}" for row in wide),
            caution=True,
        )


def _is_noisy(row: CellRow) -> bool:
    low, high = row.interval("step") or (0.0, 0.0)
    return high - low > _NOISY * row.step


# --- predictions ---


def predictions(_: ComparisonGroup, rows: Rows) -> Found:
    """Say how many predicted step times lie within 20 % of the measured ones."""
    errors = {row: row.error for row in rows if row.error is not None}
    texts = {row: f"{row.name}: {percent(error, 1, signed=True)}" for row, error in errors.items()}
    inside = [row for row in errors if row.prediction.get("in_scope")]
    if inside:
        far = [texts[row] for row in inside if abs(errors[row]) > _WITHIN]
        worst = max(inside, key=lambda row: abs(errors[row]))
        yield ReportFinding(
            "Prediction",
            f"{len(inside) - len(far)} of {len(inside)} predictions in scope lie within "
            f"{percent(_WITHIN)} of the measured step time; the largest error is that of "
            f"{texts[worst]}.{f' Outside are {listed(far)}.' if far else ''}",
            "; ".join(texts[row] for row in inside),
            caution=bool(far),
        )


def bytes_as_predicted(_: ComparisonGroup, rows: Rows) -> Found:
    """Say whether the bytes that each rank counted equal the formulas."""
    both = {
        row.name: (formula, counted)
        for row in rows
        if row.nodes > 1
        and (formula := row.prediction.get("bytes_sent"))
        and (counted := row.per_rank("bytes_sent"))
    }
    wrong = [
        name
        for name, (formula, counted) in both.items()
        if len(formula) != len(counted)
        or any(abs(one - other) > 0.5 for one, other in zip(formula, counted, strict=True))
    ]
    if wrong:
        formula, counted = (list(map(round, values)) for values in both[wrong[0]])
        yield ReportFinding(
            "Prediction",
            f"The counted bytes differ from the formulas with {'; '.join(wrong)}.",
            f"{wrong[0]}: formula {formula}, counted {counted}",
            caution=True,
        )
    elif both:
        yield ReportFinding(
            "Prediction",
            "Every rank sent as many bytes as the formulas say, in "
            f"{'the one cell that has both' if len(both) == 1 else f'all {len(both)} cells'}.",
            "compared for each rank and step, to half a byte",
        )


_WHOLE = (unfinished, noisy, iterations)
_ON_NODES = (
    *(equal_results, fastest, slower_than_one, above_ideal),
    *(bounds, stragglers, root_share),
)
_LEARNED = (accuracies, time_to_accuracy)
_PREDICTION = (predictions, bytes_as_predicted)
