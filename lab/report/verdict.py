"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from common.sync import STRATEGIES, plan_class
from common.sync.plans.base import MessagePlan
from lab.report.equality import check
from lab.report.findings import (
    EQUAL_SHARE,
    ONE_PROCESS,
    ReportFinding,
    speed,
    strategies,
    timed,
    times_text,
)
from lab.report.view import (
    CellRow,
    ComparisonGroup,
    Rows,
    listed,
    percent,
    rate_text,
    seconds_text,
)

_BUSY = 1.5  # programs for each core; ranks alone make it 1 at most, unless they share cores


class Verdict(NamedTuple):
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red.

    numbers : up to three, each a label, the value with its unit, and of what it is.
    why : what the messages of the fastest and of the slowest strategy do.
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
    rows = sorted(block.at(nodes), key=lambda row: row.step)
    wrong = [finding.text for finding in found if finding.wrong]
    if nodes == 1:
        return _of_one_node(rows)
    if wrong:
        return _of_wrong_results(block, rows, wrong)
    text = f"{_where(block, nodes)} {speed(rows)}{_one_node_alone(rows[0])}"
    text += f"{_equality(block, rows)}{_machine(rows)}."
    return Verdict(text, _numbers(rows), False, _why(rows))


def _of_one_node(rows: Rows) -> Verdict:
    text = f"On one node a step takes {timed(rows[0])}; no strategy on several nodes has been "
    return Verdict(f"{text}measured{_machine(rows)}.", _numbers(rows), False)


def _of_wrong_results(block: ComparisonGroup, rows: Rows, wrong: Sequence[str]) -> Verdict:
    """Return what is wrong, and which of the other strategies is fastest."""
    nodes = rows[0].nodes
    doubtful = check(block, nodes).doubtful
    right = [row for row in rows if row.sync not in doubtful]
    text = wrong[0]
    if len(wrong) > 1:
        text += f" ({len(wrong) - 1} more below)"
    if len(right) > 1:
        text += f" {_where(block, nodes)} {speed(right)}{_machine(right)}."
    return Verdict(text, _numbers(right or rows), True)


def _where(block: ComparisonGroup, nodes: int) -> str:
    """Return where it was measured: ``On 4 emulated nodes at 1 Gbit/s``."""
    emulated = " emulated" if block.emulated else ""
    link = f" at {rate_text(block.rate)}" if block.rate is not None else ""
    return f"On {nodes}{emulated} nodes{link}"


def _one_node_alone(best: CellRow) -> str:
    """Return the part of the sentence that says that even the fastest strategy loses time."""
    interval = best.speedup_interval
    if best.baseline is None or interval is None or interval[1] >= 1:
        return ""
    return f"; one node alone is faster ({timed(best.baseline)})"


def _why(rows: Rows) -> str:
    """Say what the messages of the fastest and of the slowest strategy do, if there are two."""
    fastest = rows[0]
    slowest = rows[-1]
    if fastest is slowest:
        return f"The messages {_messages(fastest)}."
    begin = "The"
    if not _overlap(fastest, slowest):
        begin = "Why: the"
    return f"{begin} messages {_messages(fastest)} and those {_messages(slowest)}."


def _overlap(fastest: CellRow, slowest: CellRow) -> bool:
    """Return whether both steps have intervals, and these overlap."""
    first = fastest.interval("step")
    last = slowest.interval("step")
    return first is not None and last is not None and last[0] <= first[1]


def _messages(row: CellRow) -> str:
    """Say when a strategy's messages leave, or what passes rank 0's link, and what this costs."""
    exposed = f"({seconds_text(row.medians.sync, row.step)} s of a step are exposed)"
    if (row.root_share or 0.0) > EQUAL_SHARE / row.nodes:  # rank 0 receives as much as it sends
        megabytes = 2e-6 * (row.medians.root_bytes_sent or 0.0)
        return f"of {row.sync} put {megabytes:.0f} MB a step through rank 0's link {exposed}"
    strategy = row.sync.partition("-")[0]
    leave = MessagePlan.leave
    if strategy in STRATEGIES:
        leave = plan_class(strategy).leave
    return f"of {row.sync} {leave} {exposed}"


def _machine(rows: Rows) -> str:
    """Return the part of the sentence that says why these are not the times of quiet machines."""
    if any(row.cell.oversubscribed for row in rows):
        return (
            "; the ranks share cores, so separate machines take other times (bytes and losses stay)"
        )
    loads = [run.load_per_core for row in rows for run in row.runs if run.load_per_core is not None]
    load = max(loads, default=0.0)
    return f"; the machine was busy (load {load:.1f} per core)" if load > _BUSY else ""


def _equality(block: ComparisonGroup, rows: Rows) -> str:
    """Return the part of the sentence that says whether the strategies compute the same."""
    result = check(block, rows[0].nodes)
    if len(result.equal) > 1:
        exact = sum(row.exact for row in rows)
        who = strategies(result.equal, of=len(rows))
        all_exact_agree = len(result.equal) == exact
        if all_exact_agree and len(rows) > exact > 2:
            who = f"the {exact} exact strategies"
        return f"; {who} compute the same"
    if result.confirmed:
        return f"; {listed(result.confirmed)}: equal to {ONE_PROCESS}"
    if not result.untested:
        return ""
    what = "they compute the same" if len(rows) > 1 else "it computes the mean gradient"
    reasons = listed(list(dict.fromkeys(result.untested.values())))
    return f"; whether {what} was not tested ({reasons})"


def _numbers(rows: Rows) -> list[tuple[str, str, str]]:
    """Return the ``numbers`` of a verdict. rows : the fastest first."""
    best = rows[0]
    last = rows[-1]
    numbers = [("shortest step", timed(best), best.name)]
    if best.nodes > 1:
        sync = best.medians.sync
        exposed = f"{seconds_text(sync, best.step)} s ({percent(sync / best.step)})"
        numbers.append(("exposed communication", exposed, f"in a step of {best.name}"))
    if len(rows) > 1:
        ratio = times_text(last.step / best.step)
        numbers.append(("slowest over fastest", ratio, f"{last.sync} over {best.sync}"))
    elif best.nodes > 1 and best.speedup:
        numbers.append(("speed-up", times_text(best.speedup), f"{best.name} over one node"))
    return numbers
