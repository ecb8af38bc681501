"""The figure of one recorded step: a row per rank with its sections, its messages below them.

``draw_timeline`` draws all ranks of a strategy, ``draw_beside`` one rank of several strategies.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    grid,
    line_key,
    section_patch,
    section_style,
    title,
)
from lab.report.drawings.timeline import (
    Span,
    backward_end,
    lanes,
    mean_overlap,
    share_text,
    sync_parts,
)

_DRAWN_LANES = 6  # rows of messages per rank; further rows are drawn in the last one
# Messages have no colour: colours are for sections. The kinds are filled, hollow, hatched ...
_KINDS: tuple[dict[str, Any], ...] = tuple(
    {"facecolor": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.4}
    for fill, hatch in ((INK, ""), (PAPER, ""), (PAPER, "//////"), (PAPER, "....."))
)


def draw_timeline(
    timeline: Mapping[str, Any], *, label: str, narrow: bool, emulated: bool
) -> Figure:
    """Draw the sections and messages of each rank; overlapping messages stand below each other."""
    heading = f"{label}: {share_text(mean_overlap(timeline))}"
    entries = [(f"rank {rank['rank']}", timeline, rank) for rank in timeline.get("ranks") or []]
    return _draw_lanes(entries, heading, narrow=narrow, emulated=emulated)


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
        raise NothingToShowError("The recorded step has no sections.")
    kinds = [message["kind"] for rank in ranks for message in rank.get("messages") or []]
    looks = dict(zip(dict.fromkeys(kinds), cycle(_KINDS), strict=False))
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
        _draw_rank(axis, timeline, rank, top, looks)
    axis.set_yticks([top + 0.5 for top in tops], [label for label, _, _ in entries])
    axis.tick_params(axis="y", length=0)
    axis.set(
        xlabel="milliseconds since the step began",
        xlim=(0, None),
        ylim=(bottom - 0.3, -0.2),
        axisbelow=True,
    )
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.grid(axis="x")
    drawn = {name for _, timeline, rank in entries for name in _sections(timeline, rank)}
    figure.legend(
        handles=[
            *(section_patch(name) for name in SECTIONS if name in drawn),
            *(Patch(**look, label=f"message: {kind}") for kind, look in looks.items()),
            line_key("last gradient", linewidth=1, linestyle=(0, (3, 2))),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 5,
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, heading, emulated=emulated)
    return figure


def _sections(timeline: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, list[Span]]:
    """Return the spans of each section that has any, with sync split into wait and wire."""
    sections = {**(rank.get("sections") or {}), **sync_parts(timeline, rank)}
    return {
        name: spans
        for name, spans in sections.items()
        if spans and name in SECTIONS and name != "sync"
    }


def _draw_rank(
    axis: Axes,
    timeline: Mapping[str, Any],
    rank: Mapping[str, Any],
    top: float,
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    for name, spans in _sections(timeline, rank).items():
        _draw_boxes(axis, [(*span, top, 1.0) for span in spans], **section_style(name))
    messages = rank.get("messages") or []
    found = [
        (message, top + 1.08 + 0.55 * min(index, _DRAWN_LANES - 1))
        for index, lane in enumerate(lanes(messages))
        for message in lane
    ]
    for kind in dict.fromkeys(message["kind"] for message, _ in found):
        boxes = [
            (message["begin"], message["end"], y, 0.45)
            for message, y in found
            if message["kind"] == kind
        ]
        _draw_boxes(axis, boxes, **looks[kind])
    if (end := backward_end(rank)) is not None:
        depth = min(_DRAWN_LANES, len(lanes(messages)))
        axis.plot(
            [end * 1e3] * 2,
            [top - 0.08, top + 1.1 + 0.55 * depth],
            color=INK,
            linewidth=1,
            linestyle=(0, (3, 2)),
        )


def _draw_boxes(
    axis: Axes, boxes: Sequence[tuple[float, float, float, float]], **look: Any
) -> None:
    """Draw boxes (begin and end in seconds, y, height) as one path: it makes a small SVG."""
    corners = [
        Path(
            [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)], closed=True
        )
        for x, width, y, height in (
            (begin * 1e3, (end - begin) * 1e3, y, height) for begin, end, y, height in boxes
        )
    ]
    axis.add_patch(PathPatch(Path.make_compound_path(*corners), **look))
