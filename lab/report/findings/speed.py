"""Findings about the time of a step: which is fastest, what takes the time, rank 0's share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.report.drawings.timeline import mean_overlap
from lab.report.equality import check
from lab.report.sentences import BOUND, SPEED, ReportFinding, listed, on_nodes, strategies, timed
from lab.report.view import CellRow, ComparisonGroup, percent, seconds_text

_EQUAL_SHARE = 1.2  # report a rank 0 that sends more than this many times an equal share
_ABOVE_IDEAL = 1.05  # an efficiency that no measuring error of a quiet machine reaches
_COMPUTE = ("data", "forward", "backward", "update")
_PARTS = {
    "compute": "compute (data, forward, backward, update)",
    "wire": "communication on the wire",
    "wait": "waiting for slower ranks",
}


def fastest(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Name the fastest strategy on each number of nodes, if the intervals allow it.

    Strategies that do not compute the same as the others take no part.
    """
    for nodes in block.nodes_beyond_one:
        wrong = check(block, nodes).doubtful
        rows = sorted(
            (row for row in block.at(nodes) if row.sync not in wrong),
            key=lambda row: row.measured_step,
        )
        if not rows:
            continue
        yield _fastest(rows, on_nodes(nodes))
        exact = [row for row in rows if row.exact]
        comparable = sum(bool(row.interval("step")) for row in exact) > 1
        if not rows[0].exact and comparable:
            yield _fastest(exact, f"{on_nodes(nodes)}, of the exact strategies,")


def _fastest(rows: Sequence[CellRow], where: str) -> ReportFinding:
    """Return the finding about ``rows``, which are sorted by step time."""
    evidence = "; ".join(f"{row.sync} {timed(row)}" for row in rows)
    if len(rows) == 1:
        return ReportFinding(
            SPEED,
            f"{where} only {rows[0].sync} has been measured: there is nothing to compare it with.",
            evidence,
        )
    sure = [(row, interval) for row in rows if (interval := row.interval("step"))]
    if len(sure) < 2:
        return ReportFinding(
            SPEED,
            f"{where} each strategy ran once: without an interval no order is certain. The steps "
            f"took from {timed(rows[0])} ({rows[0].sync}) to {timed(rows[-1])} ({rows[-1].sync}).",
            evidence,
            caution=True,
        )
    single = [row.sync for row in rows if not row.interval("step")]
    rest = (
        f" Left out, because it ran once and has no interval: {listed(single)}." if single else ""
    )
    (best, (_, high)), *others = sure
    tied = [row.sync for row, (low, _) in others if low <= high]
    if tied:
        text = (
            f"{where} {named(best)} has the shortest median step, {timed(best)}, but the 95 % "
            f"intervals overlap: {listed(tied)} may be as fast.{rest}"
        )
    else:
        second = others[0][0]
        text = (
            f"{where} {named(best)} is fastest: {timed(best)} a step. Next is {named(second)} "
            f"with {timed(second)}; the 95 % intervals do not overlap.{rest}"
        )
    return ReportFinding(SPEED, text, evidence)


def named(row: CellRow) -> str:
    return row.sync if row.exact else f"{row.sync} (not exact)"


def slower_than_one(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Name the cells with a speed-up below 1."""
    what = (
        "slower than one node"
        if block.scaling == "strong"
        else "processing fewer samples a second than one node"
    )
    for nodes in block.nodes_beyond_one:
        slower = [
            (row, row.speedup_interval)
            for row in block.at(nodes)
            if row.speedup and row.speedup < 1
        ]
        certain = [row for row, interval in slower if interval and interval[1] < 1]
        groups = (
            (certain, ", even at the favourable ends of both 95 % intervals."),
            (
                [row for row, interval in slower if interval and interval[1] >= 1],
                " by the medians, but the 95 % intervals overlap.",
            ),
            (
                [row for row, interval in slower if not interval],
                " by the medians; without intervals (one repeat) this is not certain.",
            ),
        )
        for members, text in groups:
            if members:
                names = strategies([row.sync for row in members], of=len(block.at(nodes)))
                are = "is" if len(members) == 1 else "are"
                yield ReportFinding(
                    SPEED,
                    f"{on_nodes(nodes)} {names} {are} {what}{text}",
                    "; ".join(f"{row.sync} {row.speedup:.2f} times" for row in members),
                    caution=members is not certain,
                )


def above_ideal(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Warn of speed-ups that are larger than the number of nodes."""
    for nodes in block.nodes_beyond_one:
        rows = {
            row.sync: row.efficiency
            for row in block.at(nodes)
            if row.efficiency and row.efficiency > _ABOVE_IDEAL
        }
        if rows:
            shares = listed([f"{sync} {percent(share)}" for sync, share in rows.items()])
            yield ReportFinding(
                SPEED,
                f"{on_nodes(nodes)} the efficiency is above the ideal 100 % ({shares}). The run on "
                "one node was disturbed, or it is slower for each sample (fewer threads, less "
                "cache). Do not trust these speed-ups: run one node again on a quiet machine.",
                "; ".join(f"{sync} {share:.3f}" for sync, share in rows.items()),
                caution=True,
            )


def bounds(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say what takes the largest part of a step: compute, communication or waiting."""
    for nodes in block.nodes_beyond_one:
        parts = {row.sync: found for row in block.at(nodes) if (found := _parts(row))}
        largest = {sync: max(found, key=found.__getitem__) for sync, found in parts.items()}
        texts = [
            f"{label} with "
            + strategies([sync for sync, name in largest.items() if name == part], of=len(parts))
            for part, label in _PARTS.items()
            if part in largest.values()
        ]
        if texts:
            yield ReportFinding(
                BOUND,
                f"{on_nodes(nodes)} the largest part of the median step is {'; '.join(texts)}.",
                "; ".join(
                    f"{sync} {percent(found[largest[sync]] / sum(found.values()))} {largest[sync]}"
                    for sync, found in parts.items()
                ),
            )


def _parts(row: CellRow) -> dict[str, float]:
    """Return seconds of each of ``_PARTS``; nothing if one is unknown or all are 0."""
    names = (*_COMPUTE, "wire", "wait")
    known = {name: seconds for name in names if (seconds := row.median(name)) is not None}
    if len(known) < len(names) or not any(known.values()):
        return {}
    compute = sum(known[name] for name in _COMPUTE)
    return {"compute": compute, "wire": known["wire"], "wait": known["wait"]}


def stragglers(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Compare the time spent waiting for slower ranks with the time of the communication."""
    for nodes in block.nodes_beyond_one:
        rows = [
            (row, wait, wire)
            for row in block.at(nodes)
            if (wait := row.median("wait")) is not None and (wire := row.median("wire")) is not None
        ]
        waiting = [row for row, wait, wire in rows if wait > wire]
        sure = [
            row.sync
            for row in waiting
            if (row.interval("wait") or (0, 0))[0] > (row.interval("wire") or (0, 0))[1]
        ]
        unsure = [row.sync for row in waiting if row.sync not in sure]
        evidence = "; ".join(
            f"{row.sync} waiting {seconds_text(wait, row.step)} s, "
            f"on the wire {seconds_text(wire, row.step)} s"
            for row, wait, wire in rows
        )
        names = listed([row.sync for row, _, _ in rows])
        complete = len(rows) == len(block.at(nodes))
        who = "no strategy" if complete else f"none of the strategies that measured it ({names})"
        claims = (
            (
                bool(sure),
                False,
                f"{listed(sure)}: ranks wait longer for slower ranks than sending takes. "
                "A faster network would save less than half of the exposed time.",
            ),
            (
                bool(unsure),
                True,
                f"{listed(unsure)}: ranks wait longer for slower ranks than sending takes, "
                "but the 95 % intervals overlap.",
            ),
            (
                bool(rows and not waiting),
                False,
                f"{who} waits longer for slower ranks than sending takes.",
            ),
        )
        for holds, caution, text in claims:
            if holds:
                yield ReportFinding(BOUND, f"{on_nodes(nodes)} {text}", evidence, caution)


def root_share(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Compare rank 0's share of all bytes sent with an equal share."""
    for nodes in block.nodes_beyond_one:
        rows = block.at(nodes)
        shares = {
            row.sync: sent / row.total_bytes
            for row in rows
            if (sent := row.median("root_bytes_sent")) is not None and row.total_bytes
        }
        uncounted = [row.sync for row in rows if row.median("root_bytes_sent") is None]
        missing = f"the bytes of {listed(uncounted)} were not counted: add --timeline to the runs."
        if not shares:
            if uncounted:
                yield ReportFinding("Bytes", f"{on_nodes(nodes)} {missing}", caution=True)
            continue
        heavy = [sync for sync, share in shares.items() if share > _EQUAL_SHARE / nodes]
        most = max(shares, key=shares.__getitem__)
        if heavy:
            name = f" ({most})" if len(heavy) > 1 else ""
            text = (
                f"rank 0 sends more than its share with {listed(heavy)}: "
                f"up to {percent(shares[most], 1)} of all bytes{name}"
            )
        else:
            who = f"with {listed(list(shares))}" if uncounted else "with any strategy"
            text = (
                f"rank 0 does not send much more than the others {who}: "
                f"at most {percent(shares[most], 1)} of all bytes"
            )
        yield ReportFinding(
            "Bytes",
            f"{on_nodes(nodes)} {text}; an equal share would be {percent(1 / nodes, 1)}."
            + (f" {missing[0].upper()}{missing[1:]}" if uncounted else ""),
            "; ".join(f"{sync} {percent(share, 1)}" for sync, share in shares.items()),
        )


def overlaps(block: ComparisonGroup, timelines: Mapping[str, Any]) -> Iterator[ReportFinding]:
    """Say how much of the communication runs during backward in the one recorded step."""
    for nodes in block.nodes:
        shares = {
            row.sync: share
            for row in block.rows
            if row.nodes == nodes
            and row.id in timelines
            and (share := mean_overlap(timelines[row.id])) is not None
        }
        under = [
            f"{sync} ({percent(share)} of its time)"
            for sync, share in shares.items()
            if share >= 0.01
        ]
        if shares:
            names = listed(list(shares))
            text = (
                f"communication overlaps backward with {listed(under)}"
                if under
                else f"{names} {'send' if len(shares) > 1 else 'sends'} nothing during backward"
            )
            yield ReportFinding(
                BOUND,
                f"{on_nodes(nodes)}, in the one recorded step, {text}.",
                "; ".join(f"{sync} {percent(share)}" for sync, share in shares.items()),
            )
