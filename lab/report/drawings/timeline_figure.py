"""The figure of one recorded step: a row per rank with its sections, its messages below them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from common.profiling.records import RankTimeline, SentMessage
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
from lab.report.timeline import Span, backward_end, label, lanes, length, sync_parts, union

Look = dict[str, Any]
_LANE = 0.55  # height of a row of messages, where a row of sections has 1
_DRAWN_LANES = 6  # rows of messages per rank; further rows are drawn in the last one
_LAST: Look = {"linewidth": 1, "linestyle": (0, (3, 2))}  # the line at the last gradient
# Messages have no colour: colours are for sections. The kinds are filled, hollow, hatched ...
_KINDS: tuple[Look, ...] = (
    {"facecolor": INK, "hatch": ""},
    {"facecolor": PAPER, "hatch": ""},
    {"facecolor": PAPER, "hatch": "//////"},
    {"facecolor": PAPER, "hatch": "....."},
)
_GAPS = 0.05  # of the exchange: less computing between messages is not drawn apart
_LONG_LABEL = 30  # characters, such as "message: broadcast inside a node"
_EDGE: Look = {"edgecolor": INK, "linewidth": 0.4}


@dataclass
class Row:
    """A rank's step in the figure; ``group`` : the ranks for which it may wait, itself included."""

    label: str
    rank: RankTimeline
    group: Sequence[RankTimeline]

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """The sections, with the parts of "sync"; gaps of little weight between messages join."""
        sections: dict[str, list[Span]] = dict(self.rank.sections.items())
        parts = sync_parts(self.group, self.rank)
        exchange = union([*parts["wire"], *parts["own"]])
        if length(parts["own"]) < _GAPS * length(exchange):
            parts |= {"wire": exchange, "own": []}
        return sections | parts

    @cached_property
    def lanes(self) -> list[list[SentMessage]]:
        return lanes(self.rank.messages)

    @property
    def height(self) -> float:
        return 1 + _LANE * min(_DRAWN_LANES, len(self.lanes))


def draw_timeline(rows: Sequence[Row], *, heading: str, narrow: bool, emulated: bool) -> Figure:
    """Draw steps of ranks from top to bottom; overlapping messages stand below each other."""
    drawn = [name for name in SECTIONS if any(row.spans.get(name) for row in rows)]
    if not drawn:
        raise NothingToShowError("The recorded step has no sections.")
    looks = _looks(rows)
    figure, (axis,) = grid(
        1,
        narrow=narrow,
        columns=1,
        height=0.34 * sum(row.height for row in rows) + 0.2 * len(rows) + 0.75,
        extra=0.6 if narrow else 0.3,
    )
    *tops, bottom = accumulate((row.height + 0.5 for row in rows), initial=0.0)
    for row, top in zip(rows, tops, strict=True):
        _draw_sections(axis, top, row, drawn)
        _draw_messages(axis, top, row, looks)
        _draw_last_gradient(axis, top, row)
    axis.set_yticks([top + 0.5 for top in tops], [row.label for row in rows])
    axis.tick_params(axis="y", length=0)
    axis.set(
        xlabel="milliseconds since the step began",
        xlim=(0, None),
        ylim=(bottom - 0.3, -0.2),
        axisbelow=True,
    )
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.grid(axis="x")
    entries = _legend(drawn, looks)
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=_columns(entries, narrow=narrow),
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, heading, emulated=emulated)
    return figure


def _looks(rows: Sequence[Row]) -> dict[str, Look]:
    """Return how each kind of message is drawn."""
    kinds = dict.fromkeys(label(message) for row in rows for message in row.rank.messages)
    looks = cycle(_KINDS)
    return {kind: next(looks) | _EDGE for kind in kinds}


def _draw_sections(axis: Axes, top: float, row: Row, names: Sequence[str]) -> None:
    for name in names:
        spans = row.spans.get(name, [])
        axis.broken_barh(_milliseconds(spans), (top, 1.0), **section_style(name))


def _draw_messages(axis: Axes, top: float, row: Row, looks: Mapping[str, Look]) -> None:
    """Draw a rank's messages below its sections."""
    for index, lane in enumerate(row.lanes):
        below = top + 1.08 + _LANE * min(index, _DRAWN_LANES - 1)
        kinds = grouped((label(message), (message.begin, message.end)) for message in lane)
        for kind, spans in kinds.items():
            axis.broken_barh(_milliseconds(spans), (below, 0.45), **looks[kind])


def _draw_last_gradient(axis: Axes, top: float, row: Row) -> None:
    end = backward_end(row.rank)
    if end is not None:
        bottom = top + row.height + 0.1
        axis.plot([end * 1e3] * 2, [top - 0.08, bottom], color=INK, **_LAST)


def _legend(sections: Sequence[str], looks: Mapping[str, Look]) -> list[Artist]:
    entries: list[Artist] = [section_patch(name) for name in sections]
    entries += [Patch(**look, label=f"message: {kind}") for kind, look in looks.items()]
    if "backward" in sections:
        entries.append(line_key("last gradient", **_LAST))
    return entries


def _columns(entries: Sequence[Artist], *, narrow: bool) -> int:
    """Return how many columns of the legend fit into the figure's width."""
    longest = max(len(str(entry.get_label())) for entry in entries)
    is_long = longest > _LONG_LABEL
    if narrow:
        return 1 if is_long else 2
    return 3 if is_long else 5


def _milliseconds(spans: Sequence[Span]) -> list[Span]:
    """Return begin and length in milliseconds of spans in seconds."""
    return [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
