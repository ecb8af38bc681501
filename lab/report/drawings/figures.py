"""The figures of rows: step time by section, efficiency, bytes sent.

They have a panel for each number of nodes and a row for each strategy. Each ``draw_*`` returns the
figure of a block for a wide or a narrow page. It raises NothingToShowError with a sentence for the
page if the figure would be empty, or if all its values are equal.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from common.errors import count
from common.utils.grouping import grouped
from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    color,
    grid,
    line_key,
    section_patch,
    section_style,
    title,
)
from lab.report.equality import wrong_rows
from lab.report.view import CellRow, ComparisonGroup, seconds_text

_ROW = 0.235  # inches per bar with its gap
_EQUAL = 0.01  # values that differ by no more than this share are called equal
_IDEAL, _ONE_NODE = (0, (4, 3)), (0, (1, 1.5))
# the square lies within the circle where both send the same
_ROOT: dict[str, Any] = {"marker": "s", "markersize": 5, "zorder": 4}
_OTHERS: dict[str, Any] = {
    "marker": "o",
    "markersize": 9.5,
    "markerfacecolor": PAPER,
    "markeredgewidth": 1.4,
    "zorder": 3,
}


def draw_step_time(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each step by section up to its median, with its 95 % interval."""
    steps = [row.step for row in block.measured]
    if not steps:
        raise NothingToShowError("Nothing is measured yet.")
    whiskers = [interval[1] for row in block.measured if (interval := row.interval("step"))]
    right = min(1.5 * max(steps), max([*steps, *whiskers]))

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        for name, begin, end in section_spans(row):
            # what lies beyond the step's own median is pale: the sections sum up to more
            style = section_style(name) | ({"alpha": 0.35} if begin >= row.step else {})
            axis.barh(y, end - begin, left=begin, height=0.7, **style)
        ends = row.interval("step") or (row.step, row.step)
        axis.plot([row.step] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
        axis.plot([ends[0], min(ends[1], right)], [y, y], color=INK, linewidth=1.2)
        _write(axis, y, f"{seconds_text(row.step, row.step)} s")

    figure, _ = _row_panels(
        block,
        draw,
        narrow=narrow,
        heading="Time of a step, by section",
        xlabel="seconds a step",
        limits=(0, right * 1.03),
        extra=0.75 if narrow else 0.55,
        handles=[
            *map(section_patch, (*SECTIONS, "rest")),
            line_key("median, 95 % interval", linewidth=1.2, marker="|", markersize=6),
        ],
        ncols=2 if narrow else 4,
        handlelength=1.4,
        columnspacing=1.2,
    )
    return figure


def section_spans(row: CellRow) -> list[tuple[str, float, float]]:
    """Return name, begin and end in seconds of each section, one after the other.

    The last one, ``rest``, ends at the step's median, and is missing if the sections reach it. A
    section that goes beyond is cut in two there.
    """
    *ends, last = accumulate(map(row.seconds, SECTIONS), initial=0.0)
    spans = [*zip(SECTIONS, ends, [*ends[1:], last], strict=True), ("rest", last, row.step)]
    return [
        (name, low, high)
        for name, begin, end in spans
        for low, high in ((begin, min(end, row.step)), (max(begin, row.step), end))
        if high > low
    ]


def draw_scaling(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each cell's efficiency with its interval, and the speed-up at the right."""
    rows = [row for row in block.measured if row.nodes > 1 and row.efficiency]
    if not rows:
        raise NothingToShowError(
            "No cell on more than one node is measured yet."
            if block.baseline
            else "Without a measured cell of one node there is no speed-up."
        )
    ends = [row.speedup_interval[1] / row.nodes for row in rows if row.speedup_interval]
    right = max(1.0, min(2.0, max([*(row.efficiency or 0.0 for row in rows), *ends])))

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        speedup = row.speedup or 0.0
        ends = row.speedup_interval or (speedup, speedup)
        low, middle, high = (min(each / row.nodes, right) for each in (ends[0], speedup, ends[1]))
        axis.plot([low, high], [y, y], color=color(row.sync), linewidth=1.6)
        axis.plot(middle, y, marker="o", markersize=6, color=color(row.sync))
        _write(axis, y, f"{speedup:.2f} times")

    figure, axes = _row_panels(
        block,
        draw,
        narrow=narrow,
        heading=f"Speed-up and efficiency{' (weak scaling)' if block.weak else ''}",
        xlabel="efficiency",
        limits=(0, right * 1.03),
        baseline=False,
        extra=0.5 if narrow else 0.35,
        handles=[
            line_key("ideal: N nodes are N times as fast", linewidth=1, linestyle=_IDEAL),
            line_key("as fast as one node", linewidth=1, linestyle=_ONE_NODE),
        ],
        ncols=1 if narrow else 2,
        handlelength=2.5,
    )
    for axis, nodes in zip(axes, block.nodes, strict=True):
        axis.xaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
        axis.axvline(1, color=INK, linewidth=1, linestyle=_IDEAL)
        axis.axvline(1 / nodes, color=INK, linewidth=1, linestyle=_ONE_NODE)
    return figure


def draw_bytes(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the MB that the root and each other rank send per step, joined by a line."""
    names = ("root_bytes_sent", "others_bytes_sent")
    sent = {
        row: [value / 1e6 for name in names if (value := row.median(name)) is not None]
        for row in block.measured
        if row.nodes > 1
    }
    panels = grouped((row.nodes, value) for row, values in sent.items() for value in values)
    if not panels:
        raise NothingToShowError("No cell on more than one node has counted its bytes yet.")
    if all(max(values) - min(values) <= _EQUAL * max(values) for values in panels.values()):
        each = (
            f"{fmean(values):,.1f} MB a step on {count(nodes, 'node')}"
            for nodes, values in panels.items()
        )
        raise NothingToShowError(
            f"No figure, because every rank of every strategy sends the same: {'; '.join(each)}."
        )
    positive = [value for values in panels.values() for value in values if value > 0]
    most, log = max(positive), max(positive) / min(positive) > 15
    floor = min(positive) / 2 if log else 0.0

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        shown = [max(value, floor) for value in sent[row]]
        if not shown:
            _write(axis, y, "bytes not counted", 0.02, style="italic")
            return
        axis.plot(shown, [y] * len(shown), color=color(row.sync), linewidth=2, alpha=0.6)
        for value, look in zip(shown, (_ROOT, _OTHERS), strict=False):
            axis.plot(value, y, color=color(row.sync), **look)

    figure, axes = _row_panels(
        block,
        draw,
        narrow=narrow,
        heading="Bytes sent in a step",
        xlabel="MB sent a step" + (" (log scale)" if log else ""),
        limits=(floor * 0.8, most * 1.7) if log else (-0.04 * most, most * 1.1),
        baseline=False,
        extra=0.5 if narrow else 0.35,
        handles=[
            line_key("root (rank 0)", linestyle="", **_ROOT),
            line_key("each of the others (mean)", linestyle="", **_OTHERS),
        ],
        ncols=2,
        handlelength=1,
    )
    for axis in axes if log else ():
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def _row_panels(
    block: ComparisonGroup,
    draw: Callable[[Axes, float, CellRow], None],
    *,
    narrow: bool,
    heading: str,
    xlabel: str,
    limits: tuple[float, float],
    baseline: bool = True,
    extra: float,
    **legend: Any,
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a panel per number of nodes and a row per strategy, and its axes.

    ``draw(axes, y, row)`` draws a row. A cell without numbers says why in its row; a strategy with
    a wrong result has a cross before its name. With ``baseline``, the one-node cell stands first
    in every panel. ``limits`` are those of x.
    """
    ones = [row for row in block.rows if row.nodes == 1 and baseline and block.nodes != [1]]
    wrong = {row.sync for row in wrong_rows(block)}
    labels = [
        *(f"{row.sync} (1 node)" for row in ones),
        *(f"✗ {sync}" if sync in wrong else sync for sync in block.syncs),
    ]
    columns = 1 if narrow else 2 if len(block.nodes) in (2, 4) else 3
    figure, axes = grid(
        len(block.nodes),
        narrow=narrow,
        columns=columns,
        height=len(labels) * _ROW + 0.75,
        extra=extra,
    )
    for index, (axis, nodes) in enumerate(zip(axes, block.nodes, strict=True)):
        rows = [block.find(sync, nodes) for sync in block.syncs]
        for y, row in enumerate([*ones, *rows]):
            if row is not None and row.step:
                draw(axis, y, row)
            else:
                _write(axis, y, "not run" if row is None else row.status, 0.02, style="italic")
        axis.set(title=count(nodes, "node"), xlabel=xlabel, xlim=limits)
        axis.set_ylim(len(labels) - 0.4, -0.6)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_yticks(range(len(labels)), labels)
        axis.tick_params(axis="y", length=0, labelleft=index % columns == 0)
        if ones:
            axis.axhline(0.5, color=INK, linewidth=0.6, alpha=0.35)
        axis.grid(axis="x")
    title(figure, heading, emulated=block.emulated)
    figure.legend(loc="outside lower center", **legend)
    return figure, axes


def _write(axis: Axes, y: float, text: str, x: float = 1.02, **look: Any) -> None:
    """Write into a row: right of the panel a value, within it why there is none."""
    axis.annotate(
        text,
        (x, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        annotation_clip=False,
        **look,
    )
