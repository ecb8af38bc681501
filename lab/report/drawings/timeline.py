"""One recorded step: how much of its messages lies under backward, and its trace for Perfetto.

``overlap`` is the share of a rank's message time before the end of its backward, during which the
rank computed. A rank's sync section after its own last gradient counts as waiting until the slowest
rank has its last gradient; the rest is time on the wire. timeline_figure.py draws the step.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.report.view import percent

Span = tuple[float, float]


def union(spans: Sequence[Sequence[float]]) -> list[Span]:
    """Return the disjoint intervals that ``spans`` cover, in order, without empty spans."""
    merged: list[Span] = []
    for begin, end in sorted((span[0], span[1]) for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def backward_end(rank: Mapping[str, Any]) -> float | None:
    """Return when this rank had its last gradient."""
    return max((end for _, end in (rank.get("sections") or {}).get("backward") or []), default=None)


def overlap(rank: Mapping[str, Any]) -> float | None:
    """Return which share of the time in messages (their union) is hidden.

    Hidden is what lies before the end of backward and outside "sync": fsdp waits for messages
    within forward and backward.
    """
    spans = union([(message["begin"], message["end"]) for message in rank.get("messages") or []])
    last, total = backward_end(rank), sum(end - begin for begin, end in spans)
    if last is None or total <= 0:
        return None
    before = [(begin, min(end, last)) for begin, end in spans]
    waits = union((rank.get("sections") or {}).get("sync") or [])
    exposed = [
        (max(begin, start), min(end, stop)) for begin, end in before for start, stop in waits
    ]
    return (_length(before) - _length(exposed)) / total


def _length(spans: Sequence[Span]) -> float:
    """Return the length of disjoint spans; one that ends before it begins counts as empty."""
    return sum(max(0.0, end - begin) for begin, end in spans)


def mean_overlap(timeline: Mapping[str, Any]) -> float | None:
    """Return the mean of ``overlap`` over the ranks that sent messages."""
    shares = [share for rank in timeline.get("ranks") or [] if (share := overlap(rank)) is not None]
    return fmean(shares) if shares else None


def share_text(share: float | None) -> str:
    """Return ``mean_overlap`` in words."""
    if share is None:
        return "no messages"
    return f"{percent(share)} of the message time is hidden behind backward"


def sync_parts(timeline: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, list[Span]]:
    """Split a rank's sync at the slowest rank's last gradient into "wait" and "wire".

    What comes before the rank's own last gradient is on the wire: weights that forward waits for.
    """
    ends = [end for other in timeline["ranks"] if (end := backward_end(other)) is not None]
    slowest, own = max(ends, default=-math.inf), backward_end(rank) or -math.inf
    parts: dict[str, list[Span]] = {"wait": [], "wire": []}
    for begin, end in (rank.get("sections") or {}).get("sync") or []:
        split = max(begin, min(end, slowest)) if begin >= own else begin
        parts["wait"].append((begin, split))
        parts["wire"].append((split, end))
    return {name: [span for span in spans if span[1] > span[0]] for name, spans in parts.items()}


def lanes(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Distribute the messages over the fewest lanes in which no two overlap."""
    found: list[list[Mapping[str, Any]]] = []
    for message in sorted(messages, key=lambda message: (message["begin"], message["end"])):
        free = next((lane for lane in found if lane[-1]["end"] <= message["begin"]), None)
        if free is None:
            found.append(free := [])
        free.append(message)
    return found


def trace(timeline: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the step as Chrome trace events in microseconds.

    Each rank is a process with a thread for its sections and one or more for its messages.
    """
    events: list[dict[str, Any]] = []
    for entry in timeline.get("ranks") or []:
        pid = entry["rank"]
        sections = (entry.get("sections") or {}) | {
            f"sync: {part}": spans for part, spans in sync_parts(timeline, entry).items()
        }
        events += [
            _named("process_name", pid, 0, f"rank {pid}"),
            _named("thread_name", pid, 0, "sections"),
        ]
        events += [
            _event(section, "section", pid, 0, span)
            for section, spans in sections.items()
            for span in spans
        ]
        for thread, lane in enumerate(lanes(entry.get("messages") or []), start=1):
            label = f"messages ({thread})" if thread > 1 else "messages"
            events.append(_named("thread_name", pid, thread, label))
            events += [
                _event(message["kind"], "message", pid, thread, (message["begin"], message["end"]))
                | {"args": {key: message.get(key) for key in ("bytes", "sent_bytes")}}
                for message in lane
            ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"cell": name, "sync": timeline.get("sync"), "step": timeline.get("step")},
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(name: str, category: str, pid: int, tid: int, span: Sequence[float]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": span[0] * 1e6,
        "dur": max(0.0, span[1] - span[0]) * 1e6,
        "args": {},
    }
