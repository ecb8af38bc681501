"""Findings about the time of a step: who is fastest, what bounds it, waiting, the root's share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.report.sentences import BOUND, SPEED, Finding, listed, on_nodes, timed
from lab.report.timeline import mean_overlap
from lab.report.view import CellRow, ComparisonGroup, percent, seconds_text

_EQUAL_SHARE = 1.2  # report a root that sends more than this many times an equal share
_COMPUTE = ("data", "forward", "backward", "update")
_PARTS = {
    "compute": "compute (data, forward, backward, update)",
    "wire": "sync on the wire",
    "wait": "waiting for slower ranks",
}


def fastest(block: ComparisonGroup) -> Iterator[Finding]:
    """Name the fastest strategy on each number of nodes, if the intervals allow it."""
    for nodes in block.nodes_beyond_one:
        rows = sorted(block.at(nodes), key=lambda row: row.measured_step)
        if not rows:
            continue
        yield _fastest(rows, on_nodes(nodes))
        exact = [row for row in rows if row.exact]
        comparable = sum(bool(row.interval("step")) for row in exact) > 1
        if not rows[0].exact and comparable:
            yield _fastest(exact, f"{on_nodes(nodes)}, among the exact strategies,")


def _fastest(rows: Sequence[CellRow], where: str) -> Finding:
    """Return the finding about ``rows``, which are sorted by step time."""
    evidence = "; ".join(f"{row.sync} {timed(row)}" for row in rows)
    if len(rows) == 1:
        return Finding(
            SPEED,
            f"{where} only {rows[0].sync} has been measured: nothing to compare.",
            evidence,
        )
    sure = [(row, interval) for row in rows if (interval := row.interval("step"))]
    if len(sure) < 2:
        return Finding(
            SPEED,
            f"{where} there is one repeat, no interval, so no order is claimed. The steps took "
            f"from {timed(rows[0])} ({rows[0].sync}) to {timed(rows[-1])} ({rows[-1].sync}).",
            evidence,
            caution=True,
        )
    single = [row.sync for row in rows if not row.interval("step")]
    rest = f" Left out for want of an interval (one repeat): {listed(single)}." if single else ""
    (best, (_, high)), *others = sure
    tied = [row.sync for row, (low, _) in others if low <= high]
    if tied:
        text = (
            f"{where} the fastest cannot be told apart: {_named(best)} has the shortest median "
            f"step, {timed(best)}, but its 95 % interval overlaps that of {listed(tied)}.{rest}"
        )
    else:
        second = others[0][0]
        text = (
            f"{where} {_named(best)} is fastest: {timed(best)} a step. Next is {_named(second)} "
            f"with {timed(second)}; the 95 % intervals do not overlap.{rest}"
        )
    return Finding(SPEED, text, evidence, caution=bool(tied))


def _named(row: CellRow) -> str:
    return row.sync if row.exact else f"{row.sync} (not exact)"


def slower_than_one(block: ComparisonGroup) -> Iterator[Finding]:
    """Name the cells with a speed-up below 1."""
    what = (
        "slower than one node"
        if block.scaling == "strong"
        else "processing fewer samples a second than one node"
    )
    slower = [
        (row, row.speedup_interval)
        for row in block.measured
        if row.nodes > 1 and row.speedup and row.speedup < 1
    ]
    groups = {
        ", also at the favourable ends of both intervals.": [
            row for row, interval in slower if interval and interval[1] < 1
        ],
        " by the median, but the intervals leave open whether really.": [
            row for row, interval in slower if interval and interval[1] >= 1
        ],
        " by the median; there is no interval, so no more is claimed.": [
            row for row, interval in slower if not interval
        ],
    }
    for text, members in groups.items():
        if members:
            yield Finding(
                SPEED,
                listed([f"{row.sync} on {row.nodes} nodes" for row in members])
                + f" {'is' if len(members) == 1 else 'are'} {what}{text}",
                "; ".join(f"{row.id} {row.speedup:.2f} times" for row in members),
                caution=True,
            )


def bounds(block: ComparisonGroup) -> Iterator[Finding]:
    """Say what takes the largest part of a step: compute, wire or waiting."""
    for nodes in block.nodes_beyond_one:
        parts = {row.sync: found for row in block.at(nodes) if (found := _parts(row))}
        largest = {sync: max(found, key=found.__getitem__) for sync, found in parts.items()}
        texts = [
            f"{label} with {listed([sync for sync, name in largest.items() if name == part])}"
            for part, label in _PARTS.items()
            if part in largest.values()
        ]
        if texts:
            yield Finding(
                BOUND,
                f"{on_nodes(nodes)} the largest part of a step, by the medians, is "
                f"{'; '.join(texts)}.",
                "; ".join(
                    f"{sync} {percent(found[largest[sync]] / sum(found.values()))} {largest[sync]}"
                    for sync, found in parts.items()
                ),
            )


def _parts(row: CellRow) -> dict[str, float]:
    """Return seconds of compute, wire and waiting; nothing if one is unknown or all are 0."""
    names = (*_COMPUTE, "wire", "wait")
    known = {name: seconds for name in names if (seconds := row.median(name)) is not None}
    if len(known) < len(names) or not any(known.values()):
        return {}
    compute = sum(known[name] for name in _COMPUTE)
    return {"compute": compute, "wire": known["wire"], "wait": known["wait"]}


def stragglers(block: ComparisonGroup) -> Iterator[Finding]:
    """Compare the time spent waiting for slower ranks with the time on the wire."""
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
            f"{row.sync} wait {seconds_text(wait, row.step)} s, "
            f"wire {seconds_text(wire, row.step)} s"
            for row, wait, wire in rows
        )
        claims = (
            (
                bool(sure),
                False,
                "more of the sync time is waiting for slower ranks than wire with "
                f"{listed(sure)}: a faster network would save less than half of it.",
            ),
            (
                bool(unsure),
                True,
                "more of the sync time is waiting than wire by the medians with "
                f"{listed(unsure)}, but no intervals that lie apart bear it out.",
            ),
            (
                bool(rows and not waiting),
                False,
                "no strategy spends more of its sync time waiting for slower ranks than on the "
                "wire.",
            ),
        )
        for holds, caution, text in claims:
            if holds:
                yield Finding(BOUND, f"{on_nodes(nodes)} {text}", evidence, caution)


def root_share(block: ComparisonGroup) -> Iterator[Finding]:
    """Compare the root's share of all bytes sent with an equal share."""
    for nodes in block.nodes_beyond_one:
        shares = {
            row.sync: sent / row.total_bytes
            for row in block.at(nodes)
            if (sent := row.median("root_bytes_sent")) is not None and row.total_bytes
        }
        if not shares:
            continue
        heavy = [sync for sync, share in shares.items() if share > _EQUAL_SHARE / nodes]
        most = max(shares, key=shares.__getitem__)
        if heavy:
            name = f", {most}" if len(heavy) > 1 else ""
            text = (
                f"the root sends more than its share with {listed(heavy)}: "
                f"up to {percent(shares[most], 1)} of all bytes{name}"
            )
        else:
            text = (
                "no strategy makes the root send much more than the others: "
                f"at most {percent(shares[most], 1)} of all bytes"
            )
        yield Finding(
            "Bytes",
            f"{on_nodes(nodes)} {text}; an equal share would be {percent(1 / nodes, 1)}.",
            "; ".join(f"{sync} {percent(share, 1)}" for sync, share in shares.items()),
        )


def overlaps(block: ComparisonGroup, timelines: Mapping[str, Any]) -> Iterator[Finding]:
    """Say how much of the message time lies under backward in the one recorded step."""
    for nodes in block.nodes:
        shares = {
            row.sync: share
            for row in block.rows
            if row.nodes == nodes
            and row.id in timelines
            and (share := mean_overlap(timelines[row.id])) is not None
        }
        under = [
            f"{sync} ({percent(share)} of their time)"
            for sync, share in shares.items()
            if share >= 0.01
        ]
        if shares:
            text = (
                f"messages lie under backward with {listed(under)}"
                if under
                else "no message lies under backward"
            )
            yield Finding(
                BOUND,
                f"{on_nodes(nodes)}, in the one step recorded, {text}.",
                "; ".join(f"{sync} {percent(share)}" for sync, share in shares.items()),
            )
