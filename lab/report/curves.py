"""The figures of lines and points: speed-up over nodes, loss over steps, predicted against measured.

As in ``lab.report.figures``, each ``draw_*`` takes a block and raises NothingToShowError where there is nothing to show.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lab.plot_style import DASHES, INK, PAPER, NothingToShowError, color, grid, marker, title
from lab.report.losses import by_seed, largest_difference
from lab.report.view import CellRow, ComparisonGroup, percent

_LOG = 6  # axes whose ends lie further apart than this factor are logarithmic
_ONE_LINE = 0.01  # losses nearer to each other than this share of the axis are one line to the eye


def draw_scaling(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each strategy's speed-up over nodes in a panel of its own, the others faint, the ideal dashed, efficiency in %."""
    one = block.baseline
    if one is None:
        raise NothingToShowError(
            "without the cell of one node there is nothing to relate the others to"
        )
    curves = {
        sync: [row for row in block.measured if row.sync == sync and row.nodes > 1 and row.speedup]
        for sync in block.syncs
    }
    curves = {sync: rows for sync, rows in curves.items() if rows}
    if not curves:
        raise NothingToShowError("no cell on more than one node has ended yet")
    fewest_spare = min((5, 4, 3), key=lambda width: (-len(curves) % width, -width))
    figure, axes = grid(
        len(curves),
        narrow=narrow,
        columns=2 if narrow else fewest_spare,
        height=1.75,
        extra=0.45,
        sharex=True,
        sharey=True,
    )
    counts = [1, *block.nodes]
    top = max([*counts, *(speedup for rows in curves.values() for speedup in _speedups(rows))])
    for axis, (sync, rows) in zip(axes, curves.items(), strict=True):
        others = [other for name, other in curves.items() if name != sync]
        _scaling_panel(axis, sync, rows, others, counts)
        axis.set_xlim(counts[0] - 0.2, counts[-1] * 1.12 + 0.15)
        axis.set_ylim(0, top * 1.12)
        if counts[-1] > 8:
            axis.set(xscale="log", xlim=(0.85, counts[-1] * 1.5))
        axis.xaxis.set_major_locator(FixedLocator(counts))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.tick_params(labelbottom=True)
    if block.scaling == "strong":
        label, heading = "speed-up, times", "Speed-up over nodes"
    else:
        label, heading = "throughput, times one node's", "Throughput over nodes (weak scaling)"
    figure.supxlabel("nodes", fontsize=9)
    figure.supylabel(label, fontsize=9)
    title(figure, f"{heading}, efficiency in %", emulated=block.emulated)
    return figure


def _speedups(rows: Sequence[CellRow]) -> list[float]:
    return [row.speedup for row in rows if row.speedup]


def _scaling_panel(
    axis: Axes,
    sync: str,
    rows: Sequence[CellRow],
    others: Sequence[Sequence[CellRow]],
    counts: Sequence[int],
) -> None:
    axis.plot(counts, counts, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
    for other in others:
        axis.plot(
            [1, *(row.nodes for row in other)],
            [1, *_speedups(other)],
            color=INK,
            linewidth=0.8,
            alpha=0.15,
        )
    axis.plot(
        [1, *(row.nodes for row in rows)],
        [1, *_speedups(rows)],
        color=color(sync),
        linewidth=1.8,
        marker=marker(sync),
        markersize=5,
    )
    for row, speedup in zip(rows, _speedups(rows), strict=True):
        low, high = row.speedup_interval or (speedup, speedup)
        high = min(high, 2 * counts[-1])
        if row.speedup_interval:
            axis.plot([row.nodes] * 2, [low, high], color=color(sync), linewidth=1.2)
        above = speedup < 0.6 * row.nodes  # towards the free side of the ideal line
        long = high - low > 0.2 * counts[-1]  # then beside the whisker
        inner = row.nodes < counts[-1]
        beside = "left" if inner and (long or not above) else "right" if long else "center"
        y = speedup if long else high if above else low
        up = -4 if not above else 12 if long else 5
        axis.annotate(
            percent(speedup / row.nodes),
            (row.nodes, y),
            xytext=({"left": 4, "center": 0, "right": -5}[beside], up),
            textcoords="offset points",
            ha=beside,
            va="bottom" if above else "top",
            fontsize=8,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
    axis.set_title(sync, fontsize=9)
    axis.grid(axis="y")


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps, a panel a number of nodes: exact strategies solid, lossy ones dashed."""
    panels = [nodes for nodes in block.nodes if any(by_seed(row) for row in block.at(nodes))]
    if not panels:
        emulated = block.emulated and block.settings.get("compute") not in (None, "real")
        raise NothingToShowError(
            "compute was emulated" if emulated else "no cell with losses has ended yet"
        )
    figure, axes = grid(
        len(panels),
        narrow=narrow,
        columns=1 if narrow else 2,
        height=2.6 if narrow else 2.9,
        extra=0.9,
        sharey=True,
    )
    handles: dict[str, Line2D] = {}
    for axis, nodes in zip(axes, panels, strict=True):
        for handle in _loss_panel(axis, block, nodes):
            handles.setdefault(str(handle.get_label()), handle)
        axis.set(xlabel="step", title=f"{nodes} node{'s' if nodes > 1 else ''}")
        axis.tick_params(labelleft=True)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid()
    for axis in axes[:: 1 if narrow else 2]:
        axis.set_ylabel("training loss (global batch)")
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=1 if narrow else 4,
        handlelength=3,
    )
    title(figure, "Loss over steps", emulated=block.emulated)
    return figure


def shared_seed(rows: Sequence[CellRow]) -> int | None:
    """The seed that most of ``rows`` have losses of."""
    seeds = [seed for row in rows for seed in by_seed(row)]
    return max(sorted(set(seeds)), key=seeds.count) if seeds else None


def _loss_panel(axis: Axes, block: ComparisonGroup, nodes: int) -> list[Line2D]:
    rows = block.at(nodes)
    seed = shared_seed(rows)
    curves = {row.sync: by_seed(row)[seed] for row in rows if seed in by_seed(row)}
    one = block.baseline
    handles = []
    if one and nodes > 1 and seed in by_seed(one) and block.scaling == "strong":
        handles += _line(
            axis,
            by_seed(one)[seed],
            label="none (1 node)",
            color=color("none"),
            linewidth=1.2,
            linestyle=(0, (1, 1.5)),
        )
    exact = [row for row in rows if row.exact and row.sync in curves]
    difference = largest_difference(exact)
    values = [value for curve in curves.values() for value in curve.values()]
    height = max(values) - min(values)
    if difference and len(exact) > 2 and difference.value <= _ONE_LINE * height:
        longest = max((curves[row.sync] for row in exact), key=len)
        handles += _line(
            axis, longest, label="exact strategies, on one another", color=INK, linewidth=1.8
        )
    else:
        for index, row in enumerate(exact):
            handles += _line(
                axis,
                curves[row.sync],
                label=row.sync,
                color=color(row.sync),
                linewidth=max(1.0, 3.2 - 0.5 * index),
            )
    for index, row in enumerate(row for row in rows if not row.exact and row.sync in curves):
        handles += _line(
            axis,
            curves[row.sync],
            label=f"{row.sync} (not exact)",
            color=color(row.sync),
            linewidth=1.6,
            linestyle=DASHES[index % len(DASHES)],
        )
    return handles


def _line(axis: Axes, curve: dict[int, float], **options: Any) -> list[Line2D]:
    steps = sorted(curve)
    dot = "." if len(steps) == 1 else None
    return axis.plot(steps, [curve[step] for step in steps], marker=dot, **options)


class _Point(NamedTuple):
    """A cell with both times of a step, in seconds."""

    row: CellRow
    predicted: float
    measured: float


def draw_prediction(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw measured over predicted step times with the diagonal and a band of 20 %; cells in scope filled, others hollow."""
    points = [
        _Point(row, row.predicted, row.measured_step) for row in block.measured if row.predicted
    ]
    if not points:
        raise NothingToShowError("no cell has both a prediction and a measurement")
    drawn = {point.row.nodes for point in points}
    panels = [nodes for nodes in block.nodes if nodes in drawn] or [1]
    figure, axes = grid(
        len(panels),
        narrow=narrow,
        columns=1 if narrow else 2,
        height=3.4 if narrow else 3.6,
        extra=0.55,
    )
    for axis, nodes in zip(axes, panels, strict=True):
        _prediction_panel(axis, [point for point in points if point.row.nodes == nodes])
        axis.set(
            xlabel="predicted, seconds a step",
            ylabel="measured, seconds a step",
            title=f"{nodes} node{'s' if nodes > 1 else ''}",
        )
    handles = [
        Line2D([], [], color=INK, linewidth=1, label="measured = predicted; band: within 20 %"),
        Line2D([], [], color=INK, marker="o", linestyle="", label="in scope"),
        Line2D(
            [], [], color=INK, marker="o", markerfacecolor=PAPER, linestyle="", label="out of scope"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if narrow else 3)
    title(figure, "Predicted against measured", emulated=block.emulated)
    return figure


def _prediction_panel(axis: Axes, points: Sequence[_Point]) -> None:
    values = [value for point in points for value in (point.predicted, point.measured)]
    low, high = min(values) / 1.15, max(values) * 1.15
    if high / low > _LOG:
        axis.set(xscale="log", yscale="log")
        for dimension in (axis.xaxis, axis.yaxis):
            dimension.set_major_locator(LogLocator(subs=(1, 2, 5)))
            dimension.set_minor_locator(NullLocator())
            dimension.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        for dimension in (axis.xaxis, axis.yaxis):
            dimension.set_major_locator(MaxNLocator(5))
    ends = np.array([low, high])
    axis.plot(ends, ends, color=INK, linewidth=1)
    axis.fill_between(ends, ends / 1.2, ends / 0.8, color=INK, alpha=0.1, linewidth=0)
    for row, predicted, measured in points:
        axis.plot(
            predicted,
            measured,
            marker=marker(row.sync),
            markersize=7,
            linestyle="",
            color=color(row.sync),
            markerfacecolor=color(row.sync) if row.in_scope else PAPER,
            markeredgewidth=1.5,
            zorder=3,
        )
    axis.set(xlim=(low, high), ylim=(low, high))
    _label(axis, points, low, high)
    axis.grid()


def _label(axis: Axes, points: Sequence[_Point], low: float, high: float) -> None:
    """Name the points in a column at the right, spread so that no two names overlap, each with a line to its point."""

    def scale(value: float) -> float:
        if high / low > _LOG:
            return float(np.log(value / low) / np.log(high / low))
        return (value - low) / (high - low)

    ordered = sorted(points, key=lambda point: point.measured)
    gap = min(0.056, 1 / max(len(ordered), 1))
    heights = spread([scale(point.measured) for point in ordered], gap)
    for (row, predicted, measured), height in zip(ordered, heights, strict=True):
        axis.annotate(
            row.sync + (" (1 node)" if row.nodes == 1 else ""),
            (predicted, measured),
            xytext=(1.05, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color(row.sync),
                "linewidth": 0.7,
                "alpha": 0.7,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move sorted ``positions`` in 0..1 apart until neighbours lie ``gap`` apart, as little as needed, within 0..1."""
    if not positions:
        return []
    steps = gap * np.arange(len(positions))
    # isotonic: of all admissible layouts the one nearest to the wanted positions (pool adjacent violators)
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in np.asarray(positions, dtype=float) - steps:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean = (before * members + mean * count) / (members + count)
            count += members
        blocks.append((mean, count))
    moved = np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
    return list(np.clip(moved, 0, max(1 - steps[-1], 0)) + steps)
