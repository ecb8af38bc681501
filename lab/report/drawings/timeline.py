"""One recorded step: how much of its messages lies under backward, and its trace for Perfetto.

``overlap`` is the share of a rank's message time before the end of its backward, during which the
rank computed. A rank's sync section after its own last gradient counts as waiting until the slowest
rank has its last gradient; the rest is time on the wire. timeline_figure.py draws the step.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from common.utils.grouping import first_fit
from lab.report.view import Json

Span = tuple[float, float]


def union(spans: Iterable[Sequence[float]]) -> list[Span]:
    """Return the disjoint intervals that ``spans`` cover, in order, without empty spans."""
    merged: list[Span] = []
    for begin, end in sorted((span[0], span[1]) for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def backward_end(rank: Json) -> float | None:
    """Return when this rank had its last gradient."""
    return max((end for _, end in rank["sections"].get("backward", [])), default=None)


def overlap(rank: Json) -> float | None:
    """Return which share of the time in messages (their union) is hidden.

    Hidden is what lies before the end of backward and outside "sync": fsdp waits for messages
    within forward and backward.
    """
    spans = union((message["begin"], message["end"]) for message in rank["messages"])
    last = backward_end(rank)
    if last is None or not spans:
        return None
    before = [(begin, min(end, last)) for begin, end in spans]
    exposed = [
        (max(begin, start), min(end, stop))
        for begin, end in before
        for start, stop in union(rank["sections"].get("sync", []))
    ]
    return (_length(before) - _length(exposed)) / _length(spans)


def _length(spans: Sequence[Span]) -> float:
    """Return the length of disjoint spans; one that ends before it begins counts as empty."""
    return sum(max(0.0, end - begin) for begin, end in spans)


def mean_overlap(timeline: Json) -> float | None:
    """Return the mean of ``overlap`` over the ranks that sent messages."""
    shares = [share for rank in timeline["ranks"] if (share := overlap(rank)) is not None]
    return fmean(shares) if shares else None


def sync_parts(timeline: Json, rank: Json) -> dict[str, list[Span]]:
    """Split a rank's sync at the slowest rank's last gradient into "wait" and "wire".

    What comes before the rank's own last gradient is on the wire: weights that forward waits for.
    """
    ends = (end for other in timeline["ranks"] if (end := backward_end(other)) is not None)
    slowest, own = max(ends, default=-math.inf), backward_end(rank) or -math.inf
    parts: dict[str, list[Span]] = {"wait": [], "wire": []}
    for begin, end in rank["sections"].get("sync", []):
        split = max(begin, min(end, slowest)) if begin >= own else begin
        parts["wait"] += [(begin, split)] if split > begin else []
        parts["wire"] += [(split, end)] if end > split else []
    return parts


def lanes(messages: Sequence[Json]) -> list[list[Json]]:
    """Distribute the messages over the fewest lanes in which no two overlap."""
    in_order = sorted(messages, key=lambda message: (message["begin"], message["end"]))
    return first_fit(in_order, lambda lane, message: lane[-1]["end"] <= message["begin"])


def trace(timeline: Json, name: str) -> dict[str, Any]:
    """Return the step as Chrome trace events in microseconds.

    Each rank is a process with a thread for its sections and one or more for its messages.
    """
    events = []
    for rank in timeline["ranks"]:
        pid, parts = rank["rank"], sync_parts(timeline, rank)
        sections = rank["sections"] | {f"sync: {part}": spans for part, spans in parts.items()}
        threads = [[(part, *span, {}) for part, spans in sections.items() for span in spans]]
        threads += [
            [
                (
                    *(message["kind"], message["begin"], message["end"]),
                    {"bytes": message["bytes"], "sent_bytes": message["sent_bytes"]},
                )
                for message in lane
            ]
            for lane in lanes(rank["messages"])
        ]
        events.append(_named("process_name", pid, 0, f"rank {pid}"))
        for tid, spans in enumerate(threads):
            label = f"messages ({tid})" if tid > 1 else "messages" if tid else "sections"
            events.append(_named("thread_name", pid, tid, label))
            events += [
                {
                    **{"ph": "X", "name": what, "cat": "message" if tid else "section"},
                    **{"pid": pid, "tid": tid, "args": args},
                    **{"ts": begin * 1e6, "dur": max(0.0, end - begin) * 1e6},
                }
                for what, begin, end, args in spans
            ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"cell": name, "sync": timeline["sync"], "step": timeline["step"]},
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
