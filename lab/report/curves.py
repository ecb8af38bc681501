"""The figures of lines and points: speed-up, loss, predicted against measured step times.

As in ``lab.report.figures``, each ``draw_*`` returns the figure of a block, or raises
NothingToShowError if it would be empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from statistics import mode
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lab.plot_style import (
    DASHES,
    INK,
    PAPER,
    NothingToShowError,
    color,
    grid,
    label_beside,
    line_key,
    marker,
    title,
)
from lab.report.losses import by_seed, largest_difference
from lab.report.view import CellRow, ComparisonGroup, nodes_text, percent

_LOG = 6  # axes whose ends lie further apart than this factor are logarithmic
_ONE_LINE = 0.01  # of the axis: losses closer than this look like one line

PredictionPoint = tuple[CellRow, float, float]
"""A cell, its predicted and its measured step time in seconds."""


def draw_scaling(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the speed-up over nodes, with a panel per strategy.

    A panel shows the other strategies faintly, the ideal speed-up dashed, and the efficiency in %.
    """
    if block.baseline is None:
        raise NothingToShowError(
            "without the cell of one node there is nothing to relate the others to"
        )
    curves = {sync: points for sync in block.syncs if (points := _speedups(block, sync))}
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
    top = max([*counts, *(speedup for points in curves.values() for _, speedup in points)])
    many = counts[-1] > 8
    for axis, sync in zip(axes, curves, strict=True):
        _scaling_panel(axis, sync, curves, counts)
        axis.set(
            xscale="log" if many else "linear",
            xlim=(0.85, counts[-1] * 1.5) if many else (0.8, counts[-1] * 1.12 + 0.15),
            ylim=(0, top * 1.12),
        )
        axis.xaxis.set(
            major_locator=FixedLocator(counts),
            minor_locator=NullLocator(),
            major_formatter=FuncFormatter(lambda value, _: f"{value:g}"),
        )
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.tick_params(labelbottom=True)
    label, heading = (
        ("speed-up, times", "Speed-up over nodes")
        if block.scaling == "strong"
        else ("throughput, times one node's", "Throughput over nodes (weak scaling)")
    )
    figure.supxlabel("nodes", fontsize=9)
    figure.supylabel(label, fontsize=9)
    title(figure, f"{heading}, efficiency in %", emulated=block.emulated)
    return figure


def _speedups(block: ComparisonGroup, sync: str) -> list[tuple[CellRow, float]]:
    rows = [row for row in block.measured if row.sync == sync and row.nodes > 1]
    return [(row, row.speedup) for row in rows if row.speedup]


def _scaling_panel(
    axis: Axes,
    sync: str,
    curves: Mapping[str, Sequence[tuple[CellRow, float]]],
    counts: Sequence[int],
) -> None:
    axis.plot(counts, counts, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
    styles: dict[str, dict[str, Any]] = {
        name: {"color": INK, "linewidth": 0.8, "alpha": 0.15} for name in curves if name != sync
    }
    styles[sync] = {"color": color(sync), "linewidth": 1.8, "marker": marker(sync), "markersize": 5}
    for name, options in styles.items():
        axis.plot(
            [1, *(row.nodes for row, _ in curves[name])],
            [1, *(speedup for _, speedup in curves[name])],
            **options,
        )
    for row, speedup in curves[sync]:
        low, high = row.speedup_interval or (speedup, speedup)
        high = min(high, 2 * counts[-1])
        if row.speedup_interval:
            axis.plot([row.nodes] * 2, [low, high], color=color(sync), linewidth=1.2)
        above = speedup < 0.6 * row.nodes  # the free side of the ideal line
        long = high - low > 0.2 * counts[-1]  # a label at its end would be far from the point
        inner = row.nodes < counts[-1]
        beside = "left" if inner else "right"
        if not long and (above or not inner):
            beside = "center"
        end = high if above else low
        rise = 12 if long else 5
        axis.annotate(
            percent(speedup / row.nodes),
            (row.nodes, speedup if long else end),
            xytext=({"left": 4, "center": 0, "right": -5}[beside], rise if above else -4),
            textcoords="offset points",
            ha=beside,
            va="bottom" if above else "top",
            fontsize=8,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
    axis.set_title(sync, fontsize=9)
    axis.grid(axis="y")


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps, with a panel per number of nodes; inexact strategies dashed."""
    panels = [nodes for nodes in block.nodes if any(by_seed(row) for row in block.at(nodes))]
    if not panels:
        raise NothingToShowError(
            "compute was emulated"
            if block.emulated and block.settings.get("compute") not in (None, "real")
            else "no cell with losses has ended yet"
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
    for index, (axis, nodes) in enumerate(zip(axes, panels, strict=True)):
        for line in _loss_panel(axis, block, nodes):
            handles.setdefault(str(line.get_label()), line)
        axis.set(
            xlabel="step",
            ylabel="training loss (global batch)" if narrow or index % 2 == 0 else "",
            title=nodes_text(nodes),
        )
        axis.tick_params(labelleft=True)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid()
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=1 if narrow else 4,
        handlelength=3,
    )
    title(figure, "Loss over steps", emulated=block.emulated)
    return figure


def _loss_panel(axis: Axes, block: ComparisonGroup, nodes: int) -> Iterator[Line2D]:
    rows = block.at(nodes)
    # the seed that most rows have; of several, the smallest
    seed = mode(sorted(seed for row in rows for seed in by_seed(row)))
    curves = {row.sync: by_seed(row)[seed] for row in rows if seed in by_seed(row)}
    one = by_seed(block.baseline).get(seed) if block.baseline else None
    if one and nodes > 1 and block.scaling == "strong":
        yield _line(
            axis,
            one,
            label="none (1 node)",
            color=color("none"),
            linewidth=1.2,
            linestyle=(0, (1, 1.5)),
        )
    exact = [row for row in rows if row.exact and row.sync in curves]
    difference = largest_difference(exact)
    values = [value for curve in curves.values() for value in curve.values()]
    visible = _ONE_LINE * (max(values) - min(values))
    if difference and len(exact) > 2 and difference.value <= visible:
        longest = max((curves[row.sync] for row in exact), key=len)
        yield _line(
            axis, longest, label="exact strategies, on one another", color=INK, linewidth=1.8
        )
    else:
        for index, row in enumerate(exact):
            yield _line(
                axis,
                curves[row.sync],
                label=row.sync,
                color=color(row.sync),
                linewidth=max(1.0, 3.2 - 0.5 * index),
            )
    lossy = [row.sync for row in rows if not row.exact and row.sync in curves]
    for sync, dashes in zip(lossy, cycle(DASHES), strict=False):
        yield _line(
            axis,
            curves[sync],
            label=f"{sync} (not exact)",
            color=color(sync),
            linewidth=1.6,
            linestyle=dashes,
        )


def _line(axis: Axes, curve: Mapping[int, float], **options: Any) -> Line2D:
    steps = sorted(curve)
    dot = "." if len(steps) == 1 else None  # a line of one point is invisible
    return axis.plot(steps, [curve[step] for step in steps], marker=dot, **options)[0]


def draw_prediction(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw measured over predicted step times, with the diagonal and a band of 20 %.

    The markers of cells in scope are filled, the others hollow.
    """
    points = [(row, row.predicted, row.measured_step) for row in block.measured if row.predicted]
    if not points:
        raise NothingToShowError("no cell has both a prediction and a measurement")
    panels = sorted({row.nodes for row, _, _ in points} & set(block.nodes)) or [1]
    figure, axes = grid(
        len(panels),
        narrow=narrow,
        columns=1 if narrow else 2,
        height=3.4 if narrow else 3.6,
        extra=0.55,
    )
    for axis, nodes in zip(axes, panels, strict=True):
        _prediction_panel(axis, [point for point in points if point[0].nodes == nodes])
        axis.set(
            xlabel="predicted, seconds a step",
            ylabel="measured, seconds a step",
            title=nodes_text(nodes),
        )
    figure.legend(
        handles=[
            line_key("measured = predicted; band: within 20 %", linewidth=1),
            line_key("in scope", marker="o", linestyle=""),
            line_key("out of scope", marker="o", linestyle="", markerfacecolor=PAPER),
        ],
        loc="outside lower center",
        ncols=1 if narrow else 3,
    )
    title(figure, "Predicted against measured", emulated=block.emulated)
    return figure


def _prediction_panel(axis: Axes, points: Sequence[PredictionPoint]) -> None:
    values = [value for _, *both in points for value in both]
    low, high = min(values) / 1.15, max(values) * 1.15
    log = high / low > _LOG
    if log:
        axis.set(xscale="log", yscale="log")
    for dimension in (axis.xaxis, axis.yaxis):
        if log:
            dimension.set(
                major_locator=LogLocator(subs=(1, 2, 5)),
                minor_locator=NullLocator(),
                major_formatter=FuncFormatter(lambda value, _: f"{value:g}"),
            )
        else:
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
    label_beside(
        axis,
        [
            (row.sync + (" (1 node)" if row.nodes == 1 else ""), x, y, color(row.sync))
            for row, x, y in points
        ],
        gap=0.056,
    )
    axis.grid()
