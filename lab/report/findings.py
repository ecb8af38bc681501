"""Findings in words, computed from the numbers alone: each a sentence, its evidence, and how far it goes.

``findings(block)`` speaks of one block of comparable cells. A sentence that the data does not carry is not written: no order
without intervals that lie apart, no equality of accuracies near chance, nothing about cells that have not ended.
``lab.report.quality`` has the sentences about losses, accuracy and predictions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.report.timeline import mean_overlap
from lab.report.view import CellRow, ComparisonGroup, percent, seconds_text

_EQUAL_SHARE = 1.2  # a root that sends this many times an equal share is named
_NOISY = 0.5  # of the step: an interval wider than this is pointed out
_REACH, _SPEED, _BOUND = "How far this carries", "Which is fastest", "What bounds a step"
_PARTS = {
    "compute": "compute (data, forward, backward, update)",
    "wire": "sync on the wire",
    "wait": "waiting for slower ranks",
}


@dataclass(frozen=True)
class Finding:
    """A sentence and the numbers that it rests on; ``topic`` groups it, ``caution`` marks a limit of what is shown."""

    topic: str
    text: str
    evidence: str = ""
    caution: bool = False


def findings(block: ComparisonGroup, timelines: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return what the cells of ``block`` show, in the order in which it is to be read."""
    from lab.report import quality

    found = [
        *unfinished(block),
        *emulation(block),
        *noisy(block),
        *fastest(block),
        *slower_than_one(block),
        *bounds(block),
        *stragglers(block),
        *overlaps(block, timelines or {}),
        *oversubscription(block),
        *root_share(block),
        *quality.exact_losses(block),
        *quality.accuracies(block),
        *quality.time_to_accuracy(block),
        *quality.predictions(block),
        *quality.bytes_as_predicted(block),
    ]
    if not block.measured:
        found.insert(
            0, Finding(_REACH, "No cell has ended yet, so there is nothing to find.", caution=True)
        )
    return merged(found)


def merged(found: Sequence[Finding]) -> list[Finding]:
    """Say once what holds on several numbers of nodes: sentences of a topic that differ in "On N nodes" alone become one."""
    groups: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for finding in found:
        match = re.match(r"On (\d+) nodes\b", finding.text)
        rest = finding.text[match.end() :] if match else finding.text
        groups.setdefault((finding.topic, rest), []).append((match[1] if match else "", finding))
    return [
        members[0][1]
        if len(members) == 1
        else Finding(
            topic,
            f"On {listed([nodes for nodes, _ in members])} nodes{rest}",
            "; ".join(f"on {nodes} nodes: {finding.evidence}" for nodes, finding in members),
            members[0][1].caution,
        )
        for (topic, rest), members in groups.items()
    ]


def listed(names: Sequence[str], *, limit: int = 20) -> str:
    """``a, b and c``; what lies beyond ``limit`` is counted."""
    names = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
    return (
        names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
    )


def on_nodes(nodes: int) -> str:
    return f"On {nodes} nodes" if nodes > 1 else "On one node"


def timed(row: CellRow) -> str:
    """``0.421 s [0.415, 0.427]``."""
    interval = row.interval("step")
    ends = (
        ""
        if interval is None
        else " [" + ", ".join(seconds_text(end, row.step) for end in interval) + "]"
    )
    return f"{seconds_text(row.step, row.step)} s{ends}"


def _several(block: ComparisonGroup) -> list[int]:
    return [nodes for nodes in block.nodes if nodes > 1]


def unfinished(block: ComparisonGroup) -> Iterator[Finding]:
    """Cells that failed, are pending, or have fewer repeats than planned."""
    texts = {
        "failed": "failed and {} not part of any comparison here.",
        "pending": "{} not been run yet.",
        "partial": "{} only partly done: the numbers rest on fewer repeats than planned.",
    }
    verbs = {"failed": ("is", "are"), "pending": ("has", "have"), "partial": ("is", "are")}
    for status, text in texts.items():
        rows = [row for row in block.rows if row.status == status]
        if rows:
            yield Finding(
                _REACH,
                f"{listed([row.id for row in rows])} {text.format(verbs[status][len(rows) > 1])}",
                f"{len(rows)} of {len(block.rows)} cells",
                caution=True,
            )


def oversubscription(block: ComparisonGroup) -> Iterator[Finding]:
    """Ranks that share cores."""
    rows = [row for row in block.measured if row.cell.get("oversubscribed")]
    if rows:
        counts = listed([str(nodes) for nodes in sorted({row.nodes for row in rows})])
        yield Finding(
            _BOUND,
            f"On {counts} nodes the ranks share cores: their compute and waiting times, speed-ups and "
            "efficiencies are not those of as many machines. What the strategies send, and whether their losses "
            "agree, holds all the same.",
            f"marked so: {listed([row.id for row in rows])}",
            caution=True,
        )


def emulation(block: ComparisonGroup) -> Iterator[Finding]:
    """What emulated compute leaves out."""
    if block.emulated and block.settings.get("compute") not in (None, "real") and block.measured:
        yield Finding(
            _REACH,
            "Compute is EMULATED: step times, overlap, waiting and bytes can be read, losses and accuracies do "
            "not exist, and memory holds parameters, gradients and buffers, but no activations.",
            f"times of profile {block.settings['compute']}",
            caution=True,
        )


def noisy(block: ComparisonGroup) -> Iterator[Finding]:
    """Cells whose repeats lie so far apart that little can be said."""
    rows = [
        row
        for row in block.measured
        if (ends := row.interval("step")) and ends[1] - ends[0] > _NOISY * row.step
    ]
    if rows:
        yield Finding(
            _REACH,
            f"The repeats of {listed([row.id for row in rows])} lie so far apart that the 95 "
            f"% interval is wider than {percent(_NOISY)} of the step: too few repeats, or a machine that had other "
            "things to do.",
            "; ".join(f"{row.id} {timed(row)}" for row in rows),
            caution=True,
        )


def fastest(block: ComparisonGroup) -> Iterator[Finding]:
    """Which strategy has the shortest step at each number of nodes, as far as the intervals lie apart."""
    for nodes in _several(block):
        rows = sorted(block.at(nodes), key=lambda row: row.step)
        yield from _fastest(rows, on_nodes(nodes))
        exact = [row for row in rows if row.exact]
        if (
            rows
            and not rows[0].exact
            and len(exact) > 1
            and sum(bool(row.interval("step")) for row in exact) > 1
        ):
            yield from _fastest(exact, f"{on_nodes(nodes)}, among the exact strategies,")


def _fastest(rows: Sequence[CellRow], where: str) -> Iterator[Finding]:
    """The sentence about ``rows``, sorted by their step."""
    evidence = "; ".join(f"{row.sync} {timed(row)}" for row in rows)
    sure = [row for row in rows if row.interval("step")]
    if len(rows) < 2:
        if rows:
            yield Finding(
                _SPEED,
                f"{where} only {rows[0].sync} has been measured: nothing to compare.",
                evidence,
            )
        return
    if len(sure) < 2:
        first, last = rows[0], rows[-1]
        yield Finding(
            _SPEED,
            f"{where} there is one repeat, no interval, so no order is claimed. The steps took from "
            f"{timed(first)} ({first.sync}) to {timed(last)} ({last.sync}).",
            evidence,
            caution=True,
        )
        return
    single = [row.sync for row in rows if not row.interval("step")]
    rest = f" Left out for want of an interval (one repeat): {listed(single)}." if single else ""
    best, *others = sure
    tied = [row.sync for row in others if row.interval("step")[0] <= best.interval("step")[1]]
    if tied:
        yield Finding(
            _SPEED,
            f"{where} the fastest cannot be told apart: {_named(best)} has the shortest median step, "
            f"{timed(best)}, but its 95 % interval overlaps that of {listed(tied)}.{rest}",
            evidence,
            caution=True,
        )
    else:
        yield Finding(
            _SPEED,
            f"{where} {_named(best)} is fastest: {timed(best)} a step. Next is {_named(others[0])} with "
            f"{timed(others[0])}; the 95 % intervals do not overlap.{rest}",
            evidence,
        )


def _named(row: CellRow) -> str:
    return row.sync if row.exact else f"{row.sync} (not exact)"


def slower_than_one(block: ComparisonGroup) -> Iterator[Finding]:
    """Cells whose speed-up lies below 1."""
    rows = [
        row
        for row in block.measured
        if row.nodes > 1 and row.speedup is not None and row.speedup < 1
    ]
    what = (
        "slower than one node"
        if block.scaling == "strong"
        else "processing fewer samples a second than one node"
    )
    groups = (
        (
            ", also at the favourable ends of both intervals.",
            [row for row in rows if row.speedup_interval and row.speedup_interval[1] < 1],
        ),
        (
            " by the median, but the intervals leave open whether really.",
            [row for row in rows if row.speedup_interval and row.speedup_interval[1] >= 1],
        ),
        (
            " by the median; there is no interval, so no more is claimed.",
            [row for row in rows if not row.speedup_interval],
        ),
    )
    for text, members in groups:
        if members:
            names = listed([f"{row.sync} on {row.nodes} nodes" for row in members])
            yield Finding(
                _SPEED,
                f"{names} {'is' if len(members) == 1 else 'are'} {what}{text}",
                "; ".join(f"{row.id} {row.speedup:.2f} times" for row in members),
                caution=True,
            )


def _parts(row: CellRow) -> dict[str, float] | None:
    parts = {"compute": row.compute, "wire": row.median("wire"), "wait": row.median("wait")}
    return None if None in parts.values() or not sum(parts.values()) else parts


def bounds(block: ComparisonGroup) -> Iterator[Finding]:
    """What takes the largest part of a step: compute, wire or waiting."""
    for nodes in _several(block):
        parts = {row.sync: found for row in block.at(nodes) if (found := _parts(row))}
        largest = {sync: max(found, key=found.__getitem__) for sync, found in parts.items()}
        pieces = [
            f"{label} with {listed([sync for sync, name in largest.items() if name == part])}"
            for part, label in _PARTS.items()
            if part in largest.values()
        ]
        if pieces:
            shares = [
                f"{sync} {percent(found[largest[sync]] / sum(found.values()))} {largest[sync]}"
                for sync, found in parts.items()
            ]
            yield Finding(
                _BOUND,
                f"{on_nodes(nodes)} the largest part of a step, by the medians, is {'; '.join(pieces)}.",
                "; ".join(shares),
            )


def stragglers(block: ComparisonGroup) -> Iterator[Finding]:
    """Waiting for slower ranks against time on the wire."""
    for nodes in _several(block):
        rows = [
            row
            for row in block.at(nodes)
            if row.median("wait") is not None and row.median("wire") is not None
        ]
        waiting = [row for row in rows if row.median("wait") > row.median("wire")]
        sure = [
            row.sync
            for row in waiting
            if (row.interval("wait") or (0, 0))[0] > (row.interval("wire") or (0, 0))[1]
        ]
        unsure = [row.sync for row in waiting if row.sync not in sure]
        evidence = "; ".join(
            f"{row.sync} wait {seconds_text(row.median('wait'), row.step)} s, wire "
            f"{seconds_text(row.median('wire'), row.step)} s"
            for row in rows
        )
        if sure:
            yield Finding(
                _BOUND,
                f"{on_nodes(nodes)} more of the sync time is waiting for slower ranks than wire with "
                f"{listed(sure)}: a faster network would save less than half of it.",
                evidence,
            )
        if unsure:
            yield Finding(
                _BOUND,
                f"{on_nodes(nodes)} more of the sync time is waiting than wire by the medians with "
                f"{listed(unsure)}, but no intervals that lie apart bear it out.",
                evidence,
                caution=True,
            )
        if rows and not waiting:
            yield Finding(
                _BOUND,
                f"{on_nodes(nodes)} no strategy spends more of its sync time waiting for slower ranks than on "
                "the wire.",
                evidence,
            )


def root_share(block: ComparisonGroup) -> Iterator[Finding]:
    """The root's share of all bytes that are sent."""
    for nodes in _several(block):
        shares = {
            row.sync: row.median("root_bytes_sent") / row.total_bytes
            for row in block.at(nodes)
            if row.total_bytes
        }
        if not shares:
            continue
        heavy = {sync: share for sync, share in shares.items() if share > _EQUAL_SHARE / nodes}
        evidence = "; ".join(f"{sync} {percent(share, 1)}" for sync, share in shares.items())
        equal = f"an equal share would be {percent(1 / nodes, 1)}"
        if heavy:
            most = max(heavy, key=heavy.__getitem__)
            name = f", {most}" if len(heavy) > 1 else ""
            yield Finding(
                "Bytes",
                f"{on_nodes(nodes)} the root sends more than its share with {listed(list(heavy))}: up to "
                f"{percent(heavy[most], 1)} of all bytes{name}; {equal}.",
                evidence,
            )
        else:
            yield Finding(
                "Bytes",
                f"{on_nodes(nodes)} no strategy makes the root send much more than the others: at most "
                f"{percent(max(shares.values()), 1)} of all bytes; {equal}.",
                evidence,
            )


def overlaps(block: ComparisonGroup, timelines: Mapping[str, Any]) -> Iterator[Finding]:
    """How much of the messages' time lies under backward, in the one step that was recorded."""
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
                _BOUND,
                f"{on_nodes(nodes)}, in the one step recorded, {text}.",
                "; ".join(f"{sync} {percent(share)}" for sync, share in shares.items()),
            )
