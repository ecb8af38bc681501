"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.report.equality import check
from lab.report.findings.limits import noisy_interval
from lab.report.findings.speed import named
from lab.report.sentences import ReportFinding, listed, strategies, timed
from lab.report.view import (
    CellRow,
    ComparisonGroup,
    interval_text,
    percent,
    rate_text,
    seconds_text,
)


@dataclass(frozen=True)
class KeyNumber:
    """A number of the answer: ``label`` names it, ``value`` has its unit, ``note`` says of what."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Verdict:
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red."""

    text: str
    numbers: tuple[KeyNumber, ...]
    wrong: bool


def verdict(block: ComparisonGroup, found: Sequence[ReportFinding]) -> Verdict:
    """Return the answer for the largest number of nodes that was measured.

    found : the findings of ``block``; the first that is ``wrong`` stands first, and its strategy
    takes no part in the rest.
    """
    wrong = [finding.text for finding in found if finding.wrong]
    nodes = max((row.nodes for row in block.measured), default=0)
    rows = sorted(block.at(nodes), key=lambda row: row.measured_step)
    if not rows:
        return Verdict("Nothing has been measured yet.", (), bool(wrong))
    if wrong:
        doubtful = check(block, nodes).doubtful
        right = [row for row in rows if row.sync not in doubtful]
        more = f" ({len(wrong) - 1} more below)" if len(wrong) > 1 else ""
        rest = f" {_where(block, nodes)} {_speed(block, right)}." if len(right) > 1 else ""
        return Verdict(wrong[0] + more + rest, _numbers(block, right or rows), True)
    text = f"{_where(block, nodes)} {_speed(block, rows)}{_alone(rows)}{_equality(block, nodes)}."
    return Verdict(text, _numbers(block, rows), False)


def _where(block: ComparisonGroup, nodes: int) -> str:
    """Return ``On 4 emulated nodes at 1 Gbit/s``."""
    count = f"{nodes}{' emulated' if block.emulated else ''} nodes" if nodes > 1 else "one node"
    link = f" at {rate_text(block.rate)}" if block.rate is not None and nodes > 1 else ""
    return f"On {count}{link}"


def _speed(block: ComparisonGroup, rows: Sequence[CellRow]) -> str:
    """Say which of ``rows``, sorted by step time, is fastest, as far as the intervals allow."""
    best, last = rows[0], rows[-1]
    step = f"{seconds_text(best.step, best.step)} s"
    times = f"{_ratio(last.measured_step / best.measured_step)} as fast as {last.sync}"
    if best.nodes == 1:
        return f"a step takes {step}; no strategy on several nodes has been measured"
    if len(rows) == 1:
        alone = f", {_ratio(best.speedup)} as fast as one node" if best.speedup else ""
        return f"{named(best)} takes {step} a step{alone}"
    sure = [row for row in rows if row.interval("step")]
    if len(sure) < len(rows):
        return (
            f"{named(best)} has the shortest step, {step}, {times}; "
            f"{'each strategy' if not sure else 'not every strategy'} ran "
            f"{'once' if not sure else 'more than once'}, so the order is not certain"
        )
    high = (best.interval("step") or (0.0, 0.0))[1]
    tied = [row for row in sure if (row.interval("step") or (0.0, 0.0))[0] <= high]
    if len(tied) == 1:
        return f"{named(best)} is fastest: {step} a step, {times}{_best_exact(rows)}"
    medians = (seconds_text(row.step, best.step) for row in (tied[0], max(tied, key=_step)))
    names = strategies([named(row) for row in tied], of=len(rows))
    rest = f", {times}" if last not in tied else ""
    if any(noisy_interval(row) for row in tied):
        return (
            f"{names} cannot be told apart ({' to '.join(medians)} s): their repeats differ too "
            f"much{rest}"
        )
    fastest = "are fastest, and " if rest else ""
    return (
        f"{names} {fastest}cannot be told apart ({' to '.join(medians)} s; their 95 % intervals "
        f"overlap){rest}"
    )


def _best_exact(rows: Sequence[CellRow]) -> str:
    """Return the shortest step of an exact strategy, if another one is faster."""
    exact = next((row for row in rows if row.exact), None)
    if exact is None or exact is rows[0]:
        return ""
    return f"; of the exact strategies {exact.sync} has the shortest step ({timed(exact)})"


def _alone(rows: Sequence[CellRow]) -> str:
    """Say that one node is faster than the fastest of ``rows``, if the intervals allow it."""
    best = rows[0]
    if best.baseline is None or not best.speedup_interval or best.speedup_interval[1] >= 1:
        return ""
    if best.scaling == "weak":
        return "; one node alone processes more samples a second"
    return f"; one node alone is faster ({timed(best.baseline)})"


def _step(row: CellRow) -> float:
    return row.measured_step


def _ratio(value: float) -> str:
    """Return ``3.2 times``; two decimals below 2, where the first one says little."""
    return f"{value:.2f} times" if value < 2 else f"{value:.1f} times"


def _equality(block: ComparisonGroup, nodes: int) -> str:
    """Return the part of the sentence that says whether the strategies compute the same."""
    result, several = check(block, nodes), len(block.at(nodes)) > 1
    if len(result.equal) > 1:
        rows = block.at(nodes)
        exact = [row.sync for row in rows if row.exact]
        names = strategies(result.equal, of=len(rows))
        if len(rows) > len(exact) == len(result.equal) > 2:
            names = f"the {len(exact)} exact strategies"
        return f"; {names} compute the same"
    if several and result.untested:
        reasons = listed(list(dict.fromkeys(result.untested.values())))
        return f"; whether they compute the same was not tested ({reasons})"
    return ""


def _numbers(block: ComparisonGroup, rows: Sequence[CellRow]) -> tuple[KeyNumber, ...]:
    best, last = rows[0], rows[-1]
    sync = best.median("sync") or 0.0
    numbers = (
        KeyNumber(
            "shortest step",
            f"{seconds_text(best.step, best.step)} s{interval_text(best)}",
            best.name,
        ),
        KeyNumber(
            "exposed communication",
            f"{seconds_text(sync, best.step)} s ({percent(sync / best.measured_step)})",
            f"in a step of {best.name}",
        ),
    )
    if len(rows) > 1:
        ratio = _ratio(last.measured_step / best.measured_step)
        return (*numbers, KeyNumber("slowest over fastest", ratio, f"{last.sync} over {best.sync}"))
    if best.speedup and best.nodes > 1:
        return (*numbers, KeyNumber("speed-up", _ratio(best.speedup), f"{best.name} over one node"))
    return numbers[:1] if best.nodes == 1 else numbers
