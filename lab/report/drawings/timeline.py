"""One recorded step: how much of its messages lies under backward, and its trace for Perfetto.

``overlap`` is the share of a rank's message time before the end of its backward, during which the
rank computed. A rank's sync section after its own last gradient counts as waiting until the slowest
rank has its last gradient; the rest is time on the wire. timeline_figure.py draws the step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from common.profiling.records import RankTimeline, SentMessage
from common.runs import TimelineFile
from common.utils.grouping import first_fit

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


def backward_end(rank: RankTimeline) -> float | None:
    """Return when this rank had its last gradient."""
    return max((end for _, end in rank.sections.get("backward", [])), default=None)


def overlap(rank: RankTimeline) -> float | None:
    """Return which share of the time in messages (their union) is hidden.

    Hidden is what lies before the end of backward and outside "sync": fsdp waits for messages
    within forward and backward.
    """
    spans = union((message.begin, message.end) for message in rank.messages)
    last = backward_end(rank)
    if last is None or not spans:
        return None
    syncs = union(rank.sections.get("sync", []))
    under_backward: list[Span] = []
    exposed: list[Span] = []  # of these, what lies in "sync"
    for begin, end in spans:
        stop = min(end, last)
        under_backward.append((begin, stop))
        for sync_begin, sync_end in syncs:
            exposed.append((max(begin, sync_begin), min(stop, sync_end)))
    return (_length(under_backward) - _length(exposed)) / _length(spans)


def _length(spans: Sequence[Span]) -> float:
    """Return the length of disjoint spans; one that ends before it begins counts as empty."""
    return sum(max(0.0, end - begin) for begin, end in spans)


def mean_overlap(ranks: Iterable[RankTimeline]) -> float | None:
    """Return the mean of ``overlap`` over the ranks that sent messages."""
    shares = [share for rank in ranks if (share := overlap(rank)) is not None]
    return fmean(shares) if shares else None


def sync_parts(ranks: Iterable[RankTimeline], rank: RankTimeline) -> dict[str, list[Span]]:
    """Split a rank's sync at the last gradient of the slowest of ``ranks`` into "wait" and "wire".

    What comes before the rank's own last gradient is on the wire: weights that forward waits for.
    """
    ends = [end for other in ranks if (end := backward_end(other)) is not None]
    slowest = max(ends, default=-math.inf)
    own = backward_end(rank) or -math.inf
    wait: list[Span] = []
    wire: list[Span] = []
    for begin, end in rank.sections.get("sync", []):
        split = begin
        if begin >= own:
            split = max(begin, min(end, slowest))
        if split > begin:
            wait.append((begin, split))
        if end > split:
            wire.append((split, end))
    return {"wait": wait, "wire": wire}


def lanes(messages: Sequence[SentMessage]) -> list[list[SentMessage]]:
    """Distribute the messages over the fewest lanes in which no two overlap."""
    in_order = sorted(messages, key=lambda message: (message.begin, message.end))
    return first_fit(in_order, lambda lane, message: lane[-1].end <= message.begin)


def label(message: SentMessage) -> str:
    """Return the kind of a message, and whether it stays inside a node, where that differs."""
    if message.scope == "inside":
        return f"{message.kind} inside a node"
    if message.scope == "between":
        return f"{message.kind} between nodes"
    return message.kind


def trace(timeline: TimelineFile, name: str) -> dict[str, Any]:
    """Return the step as Chrome trace events in microseconds.

    Each rank is a process with a thread for its sections and one or more for its messages.
    """
    events = []
    for rank in timeline.ranks:
        events.append(_named("process_name", rank.rank, 0, f"rank {rank.rank}"))
        events.append(_named("thread_name", rank.rank, 0, "sections"))
        parts = sync_parts(timeline.ranks, rank)
        sections = rank.sections | {f"sync: {part}": spans for part, spans in parts.items()}
        for section, spans in sections.items():
            events += [_event("section", rank.rank, 0, section, span) for span in spans]
        for thread, lane in enumerate(lanes(rank.messages), start=1):
            name_of_lane = "messages" if thread == 1 else f"messages ({thread})"
            events.append(_named("thread_name", rank.rank, thread, name_of_lane))
            for message in lane:
                sent = {"bytes": message.bytes, "sent_bytes": message.sent_bytes}
                span = (message.begin, message.end)
                events.append(_event("message", rank.rank, thread, label(message), span, sent))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"cell": name, "sync": timeline.sync, "step": timeline.step},
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(
    category: str,
    pid: int,
    tid: int,
    name: str,
    span: Span,
    args: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    begin, end = span
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "args": args or {},
        "ts": begin * 1e6,
        "dur": max(0.0, end - begin) * 1e6,
    }
