"""One recorded step: what its messages overlap with, and its trace for Perfetto.

``overlap`` is the share of a rank's message time before the end of its backward, during which the
rank computed. A rank's sync section after its own last gradient counts as waiting until the slowest
rank has its last gradient. In the rest, ``message_share`` is the part in which a message of the
rank was under way; in the other part the strategy computed: compressed, added, copied.
drawings/timeline_figure.py draws the step.
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
    """Return which share of the time in messages (their union) is hidden."""
    spans = _messages(rank)
    if backward_end(rank) is None or not spans:
        return None
    return _hidden(rank) / length(spans)


def _messages(rank: RankTimeline) -> list[Span]:
    return union((message.begin, message.end) for message in rank.messages)


def _hidden(rank: RankTimeline) -> float:
    """Return the seconds in messages before the end of backward and outside "sync".

    Outside "sync", because fsdp waits for messages within forward and backward.
    """
    early = [(-math.inf, backward_end(rank) or -math.inf)]
    under_backward = _common(_messages(rank), early)
    exposed = _common(under_backward, union(rank.sections.get("sync", [])))
    return length(under_backward) - length(exposed)


def _common(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """Return what lies in both, of disjoint spans each; pieces may be empty."""
    return [
        (max(begin, other_begin), min(end, other_end))
        for begin, end in spans
        for other_begin, other_end in others
    ]


def length(spans: Sequence[Span]) -> float:
    """Return the length of disjoint spans; one that ends before it begins counts as empty."""
    return sum(max(0.0, end - begin) for begin, end in spans)


def mean_overlap(ranks: Iterable[RankTimeline]) -> float | None:
    """Return the mean of ``overlap`` over the ranks that sent messages."""
    shares = [share for rank in ranks if (share := overlap(rank)) is not None]
    return fmean(shares) if shares else None


def hidden_seconds(ranks: Iterable[RankTimeline]) -> float:
    """Return the seconds of messages that backward hides, the mean over the ranks."""
    return fmean(map(_hidden, ranks))


def message_share(ranks: Sequence[RankTimeline]) -> float | None:
    """Return the share of the ranks' sync after waiting in which a message of theirs is under way.

    None without messages, or without such a time. A message is also under way while it waits for
    ranks that have not called it yet.
    """
    under_way = 0.0
    own = 0.0
    for rank in ranks:
        parts = sync_parts(ranks, rank)
        under_way += length(parts["wire"])
        own += length(parts["own"])
    if under_way + own == 0 or not any(rank.messages for rank in ranks):
        return None
    return under_way / (under_way + own)


def sync_parts(ranks: Iterable[RankTimeline], rank: RankTimeline) -> dict[str, list[Span]]:
    """Split a rank's sync at the last gradient of the slowest of ``ranks``: "wait", then the rest.

    Of the rest, "wire" has a message of the rank under way, and in "own" the strategy computes. A
    rank without messages has no "own". What comes before the rank's own last gradient is no
    waiting: weights that forward waits for.
    """
    ends = [end for other in ranks if (end := backward_end(other)) is not None]
    slowest = max(ends, default=-math.inf)
    last = backward_end(rank) or -math.inf
    wait: list[Span] = []
    rest: list[Span] = []
    for begin, end in rank.sections.get("sync", []):
        split = begin
        if begin >= last:
            split = max(begin, min(end, slowest))
        wait.append((begin, split))
        rest.append((split, end))
    messages = _messages(rank) or [(-math.inf, math.inf)]
    bounds = [-math.inf, *(bound for span in messages for bound in span), math.inf]
    between = list(zip(bounds[::2], bounds[1::2], strict=True))
    return {
        "wait": union(wait),
        "wire": union(_common(rest, messages)),
        "own": union(_common(rest, between)),
    }


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
