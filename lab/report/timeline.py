"""One recorded step, with a lane per rank: its sections, and its messages below them.

``draw_timeline`` and ``draw_beside`` draw it, ``trace`` returns it for Perfetto. ``overlap`` is the
share of a rank's message time before the end of its backward. A rank's sync section counts as
waiting until the slowest rank has its last gradient, and as time on the wire after that.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    grid,
    line_key,
    section_patch,
    title,
)
from lab.report.view import percent

Span = tuple[float, float]
_DRAWN_LANES = 6  # rows of messages per rank; further rows are drawn in the last one
_KINDS = ("#8467c9", "#11998a", "#df8b1f", "#e0568c", "#4aa3df", "#7d9b2c", "#a8714f")


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
    """Return which share of the time in messages (their union) lies before the end of backward."""
    spans = union([(message["begin"], message["end"]) for message in rank.get("messages") or []])
    last, total = backward_end(rank), sum(end - begin for begin, end in spans)
    if last is None or total <= 0:
        return None
    return sum(max(0.0, min(end, last) - begin) for begin, end in spans) / total


def mean_overlap(timeline: Mapping[str, Any]) -> float | None:
    """Return the mean of ``overlap`` over the ranks that sent messages."""
    shares = [share for rank in timeline.get("ranks") or [] if (share := overlap(rank)) is not None]
    return fmean(shares) if shares else None


def sync_parts(timeline: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, list[Span]]:
    """Split a rank's sync at the slowest rank's last gradient into "wait" and "wire"."""
    ends = [end for other in timeline["ranks"] if (end := backward_end(other)) is not None]
    slowest = max(ends, default=-math.inf)
    spans = [(begin, end) for begin, end in (rank.get("sections") or {}).get("sync") or []]
    parts = {
        "wait": [(begin, min(end, slowest)) for begin, end in spans],
        "wire": [(max(begin, slowest), end) for begin, end in spans],
    }
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


def draw_timeline(
    timeline: Mapping[str, Any], *, label: str, narrow: bool, emulated: bool
) -> Figure:
    """Draw the sections and messages of each rank; overlapping messages stand below each other."""
    heading = f"{label}: step {timeline.get('step')}, {share_text(mean_overlap(timeline))}"
    entries = [(f"rank {rank['rank']}", timeline, rank) for rank in timeline.get("ranks") or []]
    return _draw_lanes(entries, heading, narrow=narrow, emulated=emulated)


def share_text(share: float | None) -> str:
    """Return ``mean_overlap`` in words."""
    return "no messages" if share is None else f"{percent(share)} of message time under backward"


def draw_beside(
    timelines: Mapping[str, Mapping[str, Any]], *, rank: int, heading: str, emulated: bool
) -> Figure:
    """Draw one rank's step with several strategies, given by label, on one time axis."""
    entries = [(label, timeline, timeline["ranks"][rank]) for label, timeline in timelines.items()]
    return _draw_lanes(entries, heading, narrow=False, emulated=emulated)


def _draw_lanes(
    entries: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
    heading: str,
    *,
    narrow: bool,
    emulated: bool,
) -> Figure:
    """Draw ``entries``, each a label, a timeline and one of its ranks, from top to bottom."""
    ranks = [rank for _, _, rank in entries]
    if not any(spans for rank in ranks for spans in (rank.get("sections") or {}).values()):
        raise NothingToShowError("the recorded step holds no sections")
    kinds = [message["kind"] for rank in ranks for message in rank.get("messages") or []]
    colors = dict(zip(dict.fromkeys(kinds), cycle(_KINDS), strict=False))
    depths = [
        1 + 0.55 * min(_DRAWN_LANES, len(lanes(rank.get("messages") or []))) for rank in ranks
    ]
    figure, (axis,) = grid(
        1,
        narrow=narrow,
        columns=1,
        height=0.34 * sum(depths) + 0.2 * len(ranks) + 0.75,
        extra=0.6 if narrow else 0.3,
    )
    *tops, bottom = accumulate((depth + 0.5 for depth in depths), initial=0.0)
    for (_, timeline, rank), top in zip(entries, tops, strict=True):
        _draw_rank(axis, timeline, rank, top, colors)
    axis.set_yticks([top + 0.5 for top in tops], [label for label, _, _ in entries])
    axis.tick_params(axis="y", length=0)
    axis.set(
        xlabel="milliseconds since the step's first begin",
        xlim=(0, None),
        ylim=(bottom - 0.3, -0.2),
        axisbelow=True,
    )
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.grid(axis="x")
    figure.legend(
        handles=[
            *(section_patch(name) for name in SECTIONS if name != "sync"),
            *(Patch(facecolor=fill, label=f"message: {kind}") for kind, fill in colors.items()),
            line_key("last gradient", linewidth=1, linestyle=(0, (3, 2))),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 5,
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, heading, emulated=emulated)
    return figure


def _draw_rank(
    axis: Axes,
    timeline: Mapping[str, Any],
    rank: Mapping[str, Any],
    top: float,
    colors: Mapping[str, str],
) -> None:
    sections = {**(rank.get("sections") or {}), **sync_parts(timeline, rank)}
    for name, spans in sections.items():
        if name in SECTIONS and name != "sync":
            axis.broken_barh(
                [(begin * 1e3, (end - begin) * 1e3) for begin, end in spans],
                (top, 1),
                facecolor=SECTIONS[name],
                edgecolor=PAPER,
                linewidth=0.4,
                hatch="////" if name == "wait" else None,
            )
    found = lanes(rank.get("messages") or [])
    for index, lane in enumerate(found):
        for kind in dict.fromkeys(message["kind"] for message in lane):
            axis.broken_barh(
                [
                    (message["begin"] * 1e3, (message["end"] - message["begin"]) * 1e3)
                    for message in lane
                    if message["kind"] == kind
                ],
                (top + 1.08 + 0.55 * min(index, _DRAWN_LANES - 1), 0.45),
                facecolor=colors[kind],
                edgecolor=PAPER,
                linewidth=0.25,
            )
    if (end := backward_end(rank)) is not None:
        axis.plot(
            [end * 1e3] * 2,
            [top - 0.08, top + 1.1 + 0.55 * min(_DRAWN_LANES, len(found))],
            color=INK,
            linewidth=1,
            linestyle=(0, (3, 2)),
        )
