"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from lab.report.equality import check
from lab.report.findings import ReportFinding, speed, strategies, timed, times_text
from lab.report.view import CellRow, ComparisonGroup, listed, percent, rate_text, seconds_text


class KeyNumber(NamedTuple):
    """A number of the answer: ``label`` names it, ``value`` has its unit, ``note`` says of what."""

    label: str
    value: str
    note: str


class Verdict(NamedTuple):
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red."""

    text: str
    numbers: Sequence[KeyNumber]
    wrong: bool


def verdict(block: ComparisonGroup, found: Sequence[ReportFinding]) -> Verdict:
    """Return the answer for the largest number of nodes that was measured.

    found : the findings of ``block``; the first that is ``wrong`` stands first, and its strategy
    takes no part in the rest.
    """
    wrong = [finding.text for finding in found if finding.wrong]
    nodes = max((row.nodes for row in block.measured), default=0)
    rows = sorted(block.at(nodes), key=lambda row: row.step)
    if not rows:
        return Verdict("Nothing has been measured yet.", (), bool(wrong))
    count = f"{nodes}{' emulated' if block.emulated else ''} nodes" if nodes > 1 else "one node"
    link = f" at {rate_text(block.rate)}" if block.rate is not None and nodes > 1 else ""
    where = f"On {count}{link}"
    if wrong:
        doubtful = check(block, nodes).doubtful
        right = [row for row in rows if row.sync not in doubtful]
        more = f" ({len(wrong) - 1} more below)" if len(wrong) > 1 else ""
        rest = f" {where} {speed(right)}." if len(right) > 1 else ""
        return Verdict(wrong[0] + more + rest, _numbers(right or rows), True)
    if nodes == 1:
        step = f"{seconds_text(rows[0].step, rows[0].step)} s"
        text = f"a step takes {step}; no strategy on several nodes has been measured"
    else:
        text = f"{speed(rows)}{_alone(rows[0])}{_equality(block, rows)}"
    return Verdict(f"{where} {text}.", _numbers(rows), False)


def _alone(best: CellRow) -> str:
    """Say that one node is faster than the fastest cell, if the intervals allow it."""
    if not best.baseline or not best.speedup_interval or best.speedup_interval[1] >= 1:
        return ""
    if best.batch_size != best.baseline.batch_size:
        return "; one node alone processes more samples a second"
    return f"; one node alone is faster ({timed(best.baseline)})"


def _equality(block: ComparisonGroup, rows: Sequence[CellRow]) -> str:
    """Return the part of the sentence that says whether the strategies compute the same."""
    result = check(block, rows[0].nodes)
    if len(result.equal) > 1:
        exact = [row for row in rows if row.exact]
        names = strategies(result.equal, of=len(rows))
        if len(rows) > len(exact) == len(result.equal) > 2:
            names = f"the {len(exact)} exact strategies"
        return f"; {names} compute the same"
    if len(rows) > 1 and result.untested:
        reasons = listed(list(dict.fromkeys(result.untested.values())))
        return f"; whether they compute the same was not tested ({reasons})"
    return ""


def _numbers(rows: Sequence[CellRow]) -> list[KeyNumber]:
    best, last = rows[0], rows[-1]
    numbers = [KeyNumber("shortest step", timed(best), best.name)]
    if best.nodes > 1:
        sync = best.median("sync") or 0.0
        value = f"{seconds_text(sync, best.step)} s ({percent(sync / best.step)})"
        numbers.append(KeyNumber("exposed communication", value, f"in a step of {best.name}"))
    if len(rows) > 1:
        ratio = times_text(last.step / best.step)
        numbers.append(KeyNumber("slowest over fastest", ratio, f"{last.sync} over {best.sync}"))
    elif best.nodes > 1 and best.speedup:
        ratio = times_text(best.speedup)
        numbers.append(KeyNumber("speed-up", ratio, f"{best.name} over one node"))
    return numbers
