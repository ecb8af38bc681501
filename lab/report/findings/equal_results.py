"""Findings about equal results: which strategies compute the same, and which one is wrong."""

import math
from collections.abc import Iterator

from common.utils.grouping import grouped
from lab.report.equality import DDP, STEPS, Deviation, Equality, check
from lab.report.losses import differences
from lab.report.sentences import EQUAL, ReportFinding, listed, on_nodes
from lab.report.view import ComparisonGroup, small_text


def equal_results(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say which strategies compute the same, which one is wrong, and what was not comparable."""
    for nodes in block.nodes_beyond_one:
        result, where = check(block, nodes), on_nodes(nodes)
        yield from _wrong(result, where)
        if len(result.equal) > 1:
            yield _equal(block, nodes, result)
        for reason, names in grouped((why, sync) for sync, why in result.untested.items()).items():
            verb = "is" if len(names) == 1 else "are"
            yield ReportFinding(
                EQUAL,
                f"{where} {listed(names)} {verb} not comparable: {reason}.",
                caution=True,
            )
    if block.nodes_beyond_one == [2] and len(check(block, 2).equal) > 1:
        yield ReportFinding(
            EQUAL,
            "Only 2 ranks were compared: there, a strategy that divides by a literal 2 is right by "
            "chance. Compare on 3 nodes as well.",
            caution=True,
        )


def _wrong(result: Equality, where: str) -> Iterator[ReportFinding]:
    others = "ddp, PyTorch's own," if set(result.equal) == {DDP} else "the others"
    for sync, deviation in result.wrong.items():
        yield ReportFinding(
            EQUAL,
            f"{where} {sync} is not equal to {others} from step {deviation.step} on: "
            f"{_how_far(deviation)}. It claims to be exact, but does not compute the mean "
            "gradient.",
            f"equal to each other: {listed(result.equal)}" if len(result.equal) > 1 else "",
            wrong=True,
        )
    if result.disputed:
        first = min(result.disputed.values())
        yield ReportFinding(
            EQUAL,
            f"{where} {listed(sorted(result.disputed))} do not compute the same from step "
            f"{first.step} on: {_how_far(first)}. At least one of them is wrong; a comparison "
            "with ddp shows which.",
            wrong=True,
        )
    for sync in result.unequal_ranks:
        yield ReportFinding(
            EQUAL,
            f"{where} the ranks of {sync} ended with different weights, although {sync} claims to "
            "be exact.",
            wrong=True,
        )


def _how_far(deviation: Deviation) -> str:
    far = (
        f"by {small_text(deviation.value)}"
        if math.isfinite(deviation.value)
        else "and is not finite"
    )
    return f"the loss differs {far}; rounding would give less than {small_text(deviation.limit, 1)}"


def _equal(block: ComparisonGroup, nodes: int, result: Equality) -> ReportFinding:
    claiming = [row for row in block.at(nodes) if row.exact]
    rows = [row for row in claiming if row.sync in result.equal]
    all_equal = len(rows) == len(claiming) > 2
    who = (
        f"all {len(rows)} strategies that claim to be exact" if all_equal else listed(result.equal)
    )
    found = differences(rows)
    first = max((entry.value for entry in found if entry.step <= STEPS[-1]), default=0.0)
    largest = max(found, key=lambda entry: entry.value)
    if largest.value == 0:
        text = "their losses are equal at every step, to the last digit."
    else:
        text = (
            f"up to step {STEPS[-1]} their losses differ by {small_text(first)} at most, "
            "as rounding does."
        )
    if largest.value > first:
        text += (
            f" Rounding grows in later steps: the largest difference is "
            f"{small_text(largest.value)}, at step {largest.step}."
        )
    return ReportFinding(
        EQUAL,
        f"{on_nodes(nodes)} {who} compute the same: {text}",
        f"{small_text(largest.value)} at step {largest.step}, {largest.one} against "
        f"{largest.other}, loss {largest.loss:.3f}; {listed(result.equal)}",
    )
