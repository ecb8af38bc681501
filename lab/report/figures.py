"""The figures of rows: step time by section, bytes sent, peak memory.

They have a panel for each number of nodes and a row for each strategy. Each ``draw_*`` returns the
figure of a block for a wide or a narrow page, or raises NothingToShowError if it would be empty.
``lab.report.curves`` has the figures of lines and points.
"""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    color,
    grid,
    line_key,
    section_patch,
    title,
)
from lab.report.view import CellRow, ComparisonGroup, nodes_text, seconds_text

_ROW = 0.235  # inches per bar with its gap
MB = 1e6


def draw_step_time(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each step stacked by section, with its median and 95 % interval at the bar's end."""
    if not block.measured:
        raise NothingToShowError("no cell has ended yet")
    right = axis_end(block)
    split = all(row.median("wait") is not None for row in block.measured)
    figure, _ = row_panels(
        block,
        narrow=narrow,
        draw=partial(_stack, right=right),
        xlabel="seconds a step",
        right=right,
        extra=0.75 if narrow else 0.55,
    )
    figure.legend(
        handles=[
            *(section_patch(name) for name in SECTIONS if not split or name != "sync"),
            line_key("median, 95 % interval", linewidth=1.2, marker="|", markersize=6),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 4,
        handlelength=1.4,
        columnspacing=1.2,
    )
    title(figure, "Time of a step, by section", emulated=block.emulated)
    return figure


def whisker_ends(block: ComparisonGroup) -> list[float]:
    """Return the upper ends of the steps' 95 % intervals, in seconds."""
    return [interval[1] for row in block.measured if (interval := row.interval("step"))]


def axis_end(block: ComparisonGroup) -> float:
    """Return the longest step or whisker in seconds, but at most 1.5 times the longest step."""
    longest = max(row.measured_step for row in block.measured)
    return min(1.5 * longest, max([longest, *whisker_ends(block)]))


def _stack(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    left = 0.0
    split = row.median("wait") is not None and row.median("wire") is not None
    hidden = ("sync",) if split else ("wait", "wire")
    for name, fill in SECTIONS.items():
        seconds = row.median(name)
        if seconds and name not in hidden:
            axis.barh(
                y,
                seconds,
                left=left,
                height=0.7,
                color=fill,
                edgecolor=PAPER,
                linewidth=0.5,
                hatch="////" if name == "wait" else None,
            )
            left += seconds
    step = row.measured_step
    low, high = row.interval("step") or (step, step)
    high = min(high, right)
    axis.plot([step] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
    axis.plot([low, high], [y, y], color=INK, linewidth=1.2)
    axis.text(
        max(left, high, step) + right * 0.015,
        y,
        seconds_text(step, step),
        va="center",
        fontsize=8,
    )


def draw_bytes(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the bytes that the root and each other rank send per step, joined by a line."""
    values = [
        value / MB
        for row in block.measured
        if row.nodes > 1 and row.median("root_bytes_sent") is not None
        for value in _sent(row)
    ]
    if not values:
        raise NothingToShowError("no cell on more than one node has ended and counted its bytes")
    positive = [value for value in values if value > 0]
    log = bool(positive) and max(positive) / min(positive) > 15
    floor = min(positive) / 2 if log else 0.0
    figure, axes = row_panels(
        block,
        narrow=narrow,
        draw=partial(_dumbbell, floor=floor),
        xlabel="MB sent a step" + (" (log scale)" if log else ""),
        baseline=False,
        extra=0.5 if narrow else 0.35,
    )
    for axis in axes:
        if log:
            axis.set(xscale="log", xlim=(floor * 0.8, max(positive) * 1.7))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axis.set_xlim(-0.04 * max(values), max(values) * 1.1 or 1)
    figure.legend(
        handles=[
            line_key("root (rank 0)", linestyle="", marker="s", markersize=5),
            line_key(
                "each of the others (mean)",
                linestyle="",
                marker="o",
                markersize=9,
                markerfacecolor=PAPER,
            ),
        ],
        loc="outside lower center",
        ncols=2,
        handlelength=1,
    )
    title(figure, "Bytes sent in a step", emulated=block.emulated)
    return figure


def _sent(row: CellRow) -> list[float]:
    names = ("root_bytes_sent", "others_bytes_sent")
    return [value for name in names if (value := row.median(name)) is not None]


def _dumbbell(axis: Axes, y: float, row: CellRow, *, floor: float) -> None:
    sent = [max(value / MB, floor) for value in _sent(row)]
    if not sent:
        _note(axis, y, "bytes not counted")
        return
    axis.plot(sent, [y] * len(sent), color=color(row.sync), linewidth=2, alpha=0.6, zorder=2)
    if len(sent) > 1:
        axis.plot(
            sent[1],
            y,
            marker="o",
            markersize=9.5,
            markerfacecolor=PAPER,
            markeredgecolor=color(row.sync),
            markeredgewidth=1.4,
            zorder=3,
        )
    # equal values: the square lies within the circle
    axis.plot(sent[0], y, marker="s", markersize=5, color=color(row.sync), zorder=4)


def draw_memory(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw peak memory: a bar to the mean over the ranks, a tick at the largest."""
    peaks = [peak[1] for row in block.measured if (peak := _peak_memory(row))]
    if not peaks:
        raise NothingToShowError("no cell has ended and recorded its memory")
    figure, _ = row_panels(
        block,
        narrow=narrow,
        draw=partial(_memory_bar, right=max(peaks)),
        xlabel="peak memory of a rank, MB",
        right=max(peaks),
        extra=0.25,
    )
    title(figure, "Peak memory of a rank", emulated=block.emulated)
    return figure


def _peak_memory(row: CellRow) -> tuple[float, float] | None:
    """Return the mean and the largest peak memory of the ranks in MB, or None if not recorded."""
    mean = row.median("peak_memory_bytes")
    return (mean / MB, max([mean, *row.per_rank("peak_memory_bytes")]) / MB) if mean else None


def _memory_bar(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    peak = _peak_memory(row)
    if peak is None:
        _note(axis, y, "not recorded")
        return
    mean, most = peak
    axis.barh(y, mean, height=0.7, color=color(row.sync))
    axis.plot([most] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
    axis.text(most + right * 0.015, y, f"{mean:,.0f}", va="center", fontsize=8)


def _note(axis: Axes, y: float, text: str) -> None:
    """Write into a row why it has no numbers."""
    axis.annotate(
        f"  {text}",
        (0, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        style="italic",
    )


def row_panels(
    block: ComparisonGroup,
    *,
    narrow: bool,
    draw: Callable[[Axes, float, CellRow], None],
    xlabel: str,
    right: float | None = None,
    baseline: bool = True,
    extra: float,
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a panel per number of nodes and a row per strategy, and its axes.

    ``draw(axes, y, row)`` draws a row. A cell without numbers says why in its row. With
    ``baseline``, the one-node cell stands first in every panel. ``right`` is the largest x value.
    """
    one = block.find("none", 1) if baseline and block.nodes != [1] else None
    labels = (["none (1 node)"] if one else []) + block.syncs
    figure, axes = grid(
        len(block.nodes),
        narrow=narrow,
        columns=1 if narrow else 3,
        height=len(labels) * _ROW + 0.75,
        extra=extra,
        sharex=not narrow,
        sharey=not narrow,
    )
    for index, (axis, nodes) in enumerate(zip(axes, block.nodes, strict=True)):
        rows = [block.find(sync, nodes) for sync in block.syncs]
        for y, row in enumerate([one, *rows] if one else rows):
            if row is not None and row.step:
                draw(axis, y, row)
            else:
                _note(axis, y, "not run" if row is None else row.status)
        axis.set(
            title=nodes_text(nodes), xlabel=xlabel, ylim=(len(labels) - 0.4, -0.6), axisbelow=True
        )
        if right is not None:
            axis.set_xlim(0, right * (1.2 if narrow else 1.25))
            axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_yticks(range(len(labels)), labels)
        axis.tick_params(axis="y", length=0, labelleft=narrow or index % 3 == 0)
        if one:
            axis.axhline(0.5, color=INK, linewidth=0.6, alpha=0.35)
        axis.grid(axis="x")
    return figure, axes
