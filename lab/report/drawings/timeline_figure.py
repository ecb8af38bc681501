"""The figure of one recorded step: a row per rank with its sections, its messages below them."""

from collections.abc import Sequence
from itertools import accumulate, cycle
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from common.utils.grouping import grouped
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
from lab.report.drawings.timeline import Span, backward_end, lanes, sync_parts
from lab.report.view import Json

_DRAWN_LANES = 6  # rows of messages per rank; further rows are drawn in the last one
_LAST: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (3, 2))}  # the line at the last gradient
# Messages have no colour: colours are for sections. The kinds are filled, hollow, hatched ...
_KINDS: tuple[dict[str, Any], ...] = tuple(
    {"facecolor": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.4}
    for fill, hatch in ((INK, ""), (PAPER, ""), (PAPER, "//////"), (PAPER, "....."))
)


def draw_timeline(
    entries: Sequence[tuple[str, Json, Json]], *, heading: str, narrow: bool, emulated: bool
) -> Figure:
    """Draw steps of ranks from top to bottom; overlapping messages stand below each other.

    entries : a label, a timeline and one of its ranks.
    """
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
            axis.broken_barh(_milliseconds(row.get(name, [])), (top, 1.0), **section_style(name))
        for index, lane in enumerate(lanes(rank["messages"])):
            below = top + 1.08 + 0.55 * min(index, _DRAWN_LANES - 1)
            spans = grouped((one["kind"], (one["begin"], one["end"])) for one in lane)
            for kind, some in spans.items():
                axis.broken_barh(_milliseconds(some), (below, 0.45), **looks[kind])
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
            *([line_key("last gradient", **_LAST)] if "backward" in drawn else []),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 5,
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, heading, emulated=emulated)
    return figure


def _milliseconds(spans: Sequence[Span]) -> list[Span]:
    """Return begin and length in milliseconds of spans in seconds."""
    return [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
