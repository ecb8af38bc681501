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
from lab.report.drawings.timeline import backward_end, lanes, mean_overlap, share_text, sync_parts
from lab.report.view import Json

_DRAWN_LANES = 6  # rows of messages per rank; further rows are drawn in the last one
_LAST: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (3, 2))}  # the line at the last gradient
# Messages have no colour: colours are for sections. The kinds are filled, hollow, hatched ...
_KINDS: tuple[dict[str, Any], ...] = tuple(
    {"facecolor": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.4}
    for fill, hatch in ((INK, ""), (PAPER, ""), (PAPER, "//////"), (PAPER, "....."))
)


def draw_timeline(timeline: Json, *, label: str, narrow: bool, emulated: bool) -> Figure:
    """Draw the sections and messages of each rank; overlapping messages stand below each other."""
    heading = f"{label}: {share_text(mean_overlap(timeline))}"
    entries = [(f"rank {rank['rank']}", timeline, rank) for rank in timeline["ranks"]]
    return _draw_lanes(entries, heading, narrow=narrow, emulated=emulated)


def draw_beside(
    timelines: Mapping[str, Json], *, rank: int, heading: str, emulated: bool
) -> Figure:
    """Draw one rank's step with several strategies, given by label, on one time axis."""
    entries = [(label, timeline, timeline["ranks"][rank]) for label, timeline in timelines.items()]
    return _draw_lanes(entries, heading, narrow=False, emulated=emulated)


def _draw_lanes(
    entries: Sequence[tuple[str, Json, Json]], heading: str, *, narrow: bool, emulated: bool
) -> Figure:
    """Draw ``entries``, each a label, a timeline and one of its ranks, from top to bottom."""
    ranks = [rank for _, _, rank in entries]
    rows = [rank["sections"] | sync_parts(timeline, rank) for _, timeline, rank in entries]
    drawn = [name for name in SECTIONS if any(row.get(name) for row in rows)]
    if not drawn:
        raise NothingToShowError("The recorded step has no sections.")
    kinds = dict.fromkeys(message["kind"] for rank in ranks for message in rank["messages"])
    looks = dict(zip(kinds, cycle(_KINDS), strict=False))
    depths = [1 + 0.55 * min(_DRAWN_LANES, len(lanes(rank["messages"]))) for rank in ranks]
    figure, (axis,) = grid(
        1,
        narrow=narrow,
        columns=1,
        height=0.34 * sum(depths) + 0.2 * len(ranks) + 0.75,
        extra=0.6 if narrow else 0.3,
    )
    *tops, bottom = accumulate((depth + 0.5 for depth in depths), initial=0.0)
    for rank, row, top, depth in zip(ranks, rows, tops, depths, strict=True):
        for name in drawn:
            _draw_boxes(
                axis, [(*span, top, 1.0) for span in row.get(name, [])], section_style(name)
            )
        for kind, look in looks.items():
            boxes = [
                (
                    message["begin"],
                    message["end"],
                    top + 1.08 + 0.55 * min(index, _DRAWN_LANES - 1),
                    0.45,
                )
                for index, lane in enumerate(lanes(rank["messages"]))
                for message in lane
                if message["kind"] == kind
            ]
            _draw_boxes(axis, boxes, look)
        if (end := backward_end(rank)) is not None:
            axis.plot([end * 1e3] * 2, [top - 0.08, top + depth + 0.1], color=INK, **_LAST)
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
    figure.legend(
        handles=[
            *map(section_patch, drawn),
            *(Patch(**look, label=f"message: {kind}") for kind, look in looks.items()),
            line_key("last gradient", **_LAST),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 5,
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, heading, emulated=emulated)
    return figure


def _draw_boxes(axis: Axes, boxes: Sequence[tuple[float, ...]], look: dict[str, Any]) -> None:
    """Draw boxes (begin and end in seconds, y, height) as one path: it makes a small SVG."""
    paths = [
        Path(
            [
                *((1e3 * begin, y), (1e3 * end, y), (1e3 * end, y + height)),
                *((1e3 * begin, y + height), (1e3 * begin, y)),
            ],
            closed=True,
        )
        for begin, end, y, height in boxes
    ]
    if paths:
        axis.add_patch(PathPatch(Path.make_compound_path(*paths), **look))
