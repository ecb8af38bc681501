"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from lab.report.equality import check
from lab.report.findings import ReportFinding, speed, strategies, timed, times_text
from lab.report.view import (
    ComparisonGroup,
    Rows,
    listed,
    percent,
    rate_text,
    seconds_text,
)


class Verdict(NamedTuple):
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red.

    numbers : up to three, each a label, the value with its unit, and of what it is.
    """

    text: str
    numbers: Sequence[tuple[str, str, str]]
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
        return Verdict("Nothing has been measured yet.", (), False)
    if nodes == 1:
        alone = f"a step takes {timed(rows[0])}; no strategy on several nodes has been measured"
        return Verdict(f"On one node {alone}.", _numbers(rows), False)
    link = f" at {rate_text(block.rate)}" if block.rate is not None else ""
    where = f"On {nodes}{' emulated' if block.emulated else ''} nodes{link}"
    if wrong:
        doubtful = check(block, nodes).doubtful
        right = [row for row in rows if row.sync not in doubtful]
        more = f" ({len(wrong) - 1} more below)" if len(wrong) > 1 else ""
        rest = f" {where} {speed(right)}." if len(right) > 1 else ""
        return Verdict(wrong[0] + more + rest, _numbers(right or rows), True)
    one, most = rows[0].baseline, (rows[0].speedup_interval or (1, 1))[1]
    faster = f"; one node alone is faster ({timed(one)})" if one and most < 1 else ""
    return Verdict(f"{where} {speed(rows)}{faster}{_equality(block, rows)}.", _numbers(rows), False)


def _equality(block: ComparisonGroup, rows: Rows) -> str:
    """Return the part of the sentence that says whether the strategies compute the same."""
    result = check(block, rows[0].nodes)
    exact = sum(row.exact for row in rows)
    if len(result.equal) > 1:
        every = len(rows) > exact == len(result.equal) > 2
        equal = strategies(result.equal, of=len(rows))
        return f"; {f'the {exact} exact strategies' if every else equal} compute the same"
    reasons = listed(list(dict.fromkeys(result.untested.values())))
    untested = f"; whether they compute the same was not tested ({reasons})"
    return untested if len(rows) > 1 and reasons else ""


def _numbers(rows: Rows) -> list[tuple[str, str, str]]:
    best, last = rows[0], rows[-1]
    numbers = [("shortest step", timed(best), best.name)]
    if best.nodes > 1:
        sync = best.seconds("sync")
        exposed = f"{seconds_text(sync, best.step)} s ({percent(sync / best.step)})"
        numbers.append(("exposed communication", exposed, f"in a step of {best.name}"))
    if len(rows) > 1:
        pair = f"{last.sync} over {best.sync}"
        numbers.append(("slowest over fastest", times_text(last.step / best.step), pair))
    elif best.nodes > 1 and best.speedup:
        numbers.append(("speed-up", times_text(best.speedup), f"{best.name} over one node"))
    return numbers
