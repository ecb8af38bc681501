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
    wrong = [finding.text for finding in found if finding.wrong]
    nodes = max((row.nodes for row in block.measured), default=0)
    rows = sorted(block.at(nodes), key=lambda row: row.step)
    if not rows:
        return Verdict("Nothing has been measured yet.", (), False)
    if nodes == 1:
        alone = f"a step takes {timed(rows[0])}; no strategy on several nodes has been measured"
        return Verdict(f"On one node {alone}{_machine(rows)}.", _numbers(rows), False)
    link = f" at {rate_text(block.rate)}" if block.rate is not None else ""
    where = f"On {nodes}{' emulated' if block.emulated else ''} nodes{link}"
    if wrong:
        doubtful = check(block, nodes).doubtful
        right = [row for row in rows if row.sync not in doubtful]
        more = f" ({len(wrong) - 1} more below)" if len(wrong) > 1 else ""
        rest = f" {where} {speed(right)}{_machine(right)}." if len(right) > 1 else ""
        return Verdict(wrong[0] + more + rest, _numbers(right or rows), True)
    one, most = rows[0].baseline, (rows[0].speedup_interval or (1, 1))[1]
    faster = f"; one node alone is faster ({timed(one)})" if one and most < 1 else ""
    text = f"{where} {speed(rows)}{faster}{_equality(block, rows)}{_machine(rows)}."
    ends = dict.fromkeys((rows[0], rows[-1]))  # the fastest and the slowest, if there are two
    first, last = rows[0].interval("step"), rows[-1].interval("step")
    apart = len(ends) > 1 and not (first and last and last[0] <= first[1])
    why = ("Why: the" if apart else "The") + " messages "
    return Verdict(
        text, _numbers(rows), False, why + " and those ".join(map(_messages, ends)) + "."
    )


def _messages(row: CellRow) -> str:
    """Say when a strategy's messages leave, or what passes rank 0's link, and what this costs."""
    strategy = row.sync.partition("-")[0]
    leave = plan_class(strategy).leave if strategy in STRATEGIES else MessagePlan.leave
    if (row.root_share or 0.0) > EQUAL_SHARE / row.nodes:  # rank 0 receives as much as it sends
        megabytes = 2e-6 * (row.median("root_bytes_sent") or 0.0)
        leave = f"put {megabytes:.0f} MB a step through rank 0's link"
    exposed = seconds_text(row.seconds("sync"), row.step)
    return f"of {row.sync} {leave} ({exposed} s of a step are exposed)"


def _machine(rows: Rows) -> str:
    """Return the part of the sentence that says why these are not the times of quiet machines."""
    load = max((run.get("load_per_core") or 0.0 for row in rows for run in row.runs), default=0.0)
    reasons = {
        "; the ranks share cores, so separate machines take other times (bytes and losses stay)": (
            any(row.oversubscribed for row in rows)
        ),
        f"; the machine was busy (load {load:.1f} per core)": load > _BUSY,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _equality(block: ComparisonGroup, rows: Rows) -> str:
    """Return the part of the sentence that says whether the strategies compute the same."""
    result = check(block, rows[0].nodes)
    exact = sum(row.exact for row in rows)
    if len(result.equal) > 1:
        every = len(rows) > exact == len(result.equal) > 2
        who = f"the {exact} exact strategies" if every else strategies(result.equal, of=len(rows))
        return f"; {who} compute the same"
    if result.confirmed:
        return f"; {listed(result.confirmed)}: equal to {ONE_PROCESS}"
    reasons = listed(list(dict.fromkeys(result.untested.values())))
    what = "they compute the same" if len(rows) > 1 else "it computes the mean gradient"
    return f"; whether {what} was not tested ({reasons})" if reasons else ""


def _numbers(rows: Rows) -> list[tuple[str, str, str]]:
    best, last = rows[0], rows[-1]
    numbers = [("shortest step", timed(best), best.name)]
    if best.nodes > 1:
        sync = best.seconds("sync")
        exposed = f"{seconds_text(sync, best.step)} s ({percent(sync / best.step)})"
        numbers.append(("exposed communication", exposed, f"in a step of {best.name}"))
    if len(rows) > 1:
        ratio = times_text(last.step / best.step)
        numbers.append(("slowest over fastest", ratio, f"{last.sync} over {best.sync}"))
    elif best.nodes > 1 and best.speedup:
        numbers.append(("speed-up", times_text(best.speedup), f"{best.name} over one node"))
    return numbers
