"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from common.say import factor_text, listed, percent
from lab.report.causes import busy, load, reasons, whole
from lab.report.findings import (
    ReportFinding,
    a_step,
    averaged,
    speed,
    timed,
)
from lab.report.view import (
    CellRow,
    ComparisonGroup,
    Rows,
    link_text,
    seconds_text,
    steady,
    tied,
)


class Verdict(NamedTuple):
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red.

    numbers : up to three, each a label, the value with its unit, and of what it is.
    why : lines that say what makes the slowest strategy slower than the fastest, as far as the runs
    show it.
    """

    text: str
    numbers: Sequence[tuple[str, str, str]]
    wrong: bool
    why: str = ""


def verdict(block: ComparisonGroup, found: Sequence[ReportFinding]) -> Verdict:
    """Return the answer for the largest number of nodes that was measured.

    found : the findings of ``block``; the first that is ``wrong`` stands first, and its strategy
    takes no part in the rest.
    """
    if not block.measured:
        return Verdict("Nothing has been measured yet.", (), False)
    nodes = max(row.nodes for row in block.measured)
    rows = block.at(nodes)
    wrong = [finding.text for finding in found if finding.wrong]
    if nodes == 1:
        place = rows[0].place
        text = (
            f"On one {place} {a_step(rows[0])} takes {timed(rows[0])}; no strategy on several "
            f"{place}s has been measured{_machine(rows)}."
        )
        return Verdict(text, _numbers(rows), False)
    if wrong:
        return _of_wrong_results(block, rows, wrong)
    text = f"{_where(block, nodes)} {speed(rows)}{_one_node_alone(steady(rows)[0])}"
    text += f"{_averaging(rows)}{_machine(rows)}."
    return Verdict(text, _numbers(rows), False, "\n".join(reasons(rows)))


def _of_wrong_results(block: ComparisonGroup, rows: Rows, wrong: Sequence[str]) -> Verdict:
    """Return what is wrong, and which of the other strategies is fastest."""
    nodes = rows[0].nodes
    right = [row for row in rows if not row.claim.wrong]
    text = wrong[0]
    if len(wrong) > 1:
        text += f" ({len(wrong) - 1} more below)"
    if len(right) > 1:
        text += f" {_where(block, nodes)} {speed(right)}{_machine(right)}."
    return Verdict(text, _numbers(right or rows), True)


def _where(block: ComparisonGroup, nodes: int) -> str:
    """Return where it was measured: ``On 4 emulated nodes at 1 Gbit/s``."""
    emulated = " emulated" if block.emulated else ""
    link = f" at {link_text(block.rate)}" if block.rate is not None else ""
    return f"On {nodes}{emulated} {block.place}s{block.each}{link}"


def _one_node_alone(best: CellRow) -> str:
    """Return the part of the sentence that says that even the fastest strategy loses time."""
    interval = best.speedup_interval
    if best.baseline is None or interval is None or interval[1] >= 1:
        return ""
    return f"; one {best.alone} alone is faster ({timed(best.baseline)})"


def _machine(rows: Rows) -> str:
    """Return the part of the sentence that says why these are not the times of quiet machines."""
    if any(row.cell.oversubscribed for row in rows):
        return (
            "; the ranks share cores, so separate machines take other times (bytes and losses stay)"
        )
    alone = [rows[0].baseline] if rows[0].baseline is not None and rows[0].nodes > 1 else []
    measured = [*alone, *rows]  # speed-ups compare with the run on one rank
    disturbed = [row for row in measured if busy(row)]
    if not disturbed:
        return ""
    text = f"load {max(map(load, disturbed)):.1f} per core"
    if len(disturbed) < len(measured):
        text = f"{text} during {listed([row.name for row in disturbed])}"
    return f"; the machine was busy ({text})"


def _averaging(rows: Rows) -> str:
    """Return the part of the sentence that says whether every rank got the mean gradient."""
    right = averaged(rows)
    if right:
        return f"; with {right} every rank got the mean gradient in the first step"
    reasons = listed(dict.fromkeys(row.claim.why_not for row in rows if row.claim.why_not))
    if not reasons:
        return ""
    return f"; whether every rank got the mean gradient was not checked ({reasons})"


def _numbers(rows: Rows) -> list[tuple[str, str, str]]:
    """Return the ``numbers`` of a verdict."""
    most = whole(rows)
    best = most.faster
    last = most.slower
    equal = tied(rows)
    who = best.name
    if len(equal) > 1:
        who = f"{best.name}; {listed(map(attrgetter('sync'), equal))} cannot be told apart"
    numbers = [(f"shortest {a_step(best).partition(' ')[2]}", timed(best), who)]
    if best.nodes > 1:
        sync = best.medians.sync
        exposed = f"{seconds_text(sync, best.step)} s ({percent(sync / best.step)})"
        numbers.append(("exposed communication", exposed, f"mean over the ranks of {best.name}"))
    if last is not best:
        ratio = f"{factor_text(last.seconds / best.seconds)} times"
        note = f"{last.sync} over {best.sync}"
        if not most.by_messages:
            note += "; most of it is not communication"
        numbers.append(("slowest over fastest", ratio, note))
    elif best.nodes > 1 and best.speedup:
        numbers.append(
            ("speed-up", f"{factor_text(best.speedup)} times", f"{best.name} over one {best.alone}")
        )
    return numbers
