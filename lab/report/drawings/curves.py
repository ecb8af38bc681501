"""The figures of lines: loss and time over the steps, time and speed-up over the number of ranks.

As in ``lab.report.drawings.figures``, each ``draw_*`` returns the figure of a block, or raises
NothingToShowError with a sentence for the page if there is nothing to show.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from common.say import count
from lab.plot_style import (
    DASHES,
    INK,
    NothingToShowError,
    grid,
    line_key,
    title,
)
from lab.report.losses import Curves, curves, differences
from lab.report.view import ComparisonGroup, Rows
from lab.strategy_style import color, marker

_ONE_LINE = 0.01  # of the axis: losses closer than this look like one line
_DOTTED = (0, (1, 1.5))  # the line of a single rank


class DrawnLine(NamedTuple):
    """A line of a panel; ``values`` by step."""

    label: str
    values: Mapping[int, float]
    look: dict[str, Any]


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps, a panel per number of ranks, inexact strategies dashed."""
    recorded = [nodes for nodes in block.nodes if curves(block.at(nodes))]
    if not recorded and block.emulated_compute:
        raise NothingToShowError("No figure, because compute was emulated: nothing was learned.")
    if not recorded:
        raise NothingToShowError("No cell has recorded its losses yet.")
    panels = {nodes: list(_lines(block, nodes)) for nodes in recorded}
    return _draw_panels(
        block, panels, "Loss over steps", "training loss (global batch)", narrow=narrow
    )


def _draw_panels(
    block: ComparisonGroup,
    panels: Mapping[int, Sequence[DrawnLine]],
    heading: str,
    ylabel: str,
    *,
    narrow: bool,
) -> Figure:
    """Draw lines over the steps, with a panel for each number of ranks and one legend."""
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
        for line in panels[nodes]:
            handles.setdefault(line.label, _draw_line(axis, line))
        axis.set(xlabel="step", title=block.size_text(nodes))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid()
        if narrow or index % 2 == 0:
            axis.set_ylabel(ylabel)
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=1 if narrow else 3,
        handlelength=3,
    )
    title(figure, heading, emulated=block.emulated)
    return figure


def draw_iterations(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the time of each iteration but the first on rank 0, a panel per number of ranks."""
    panels = {nodes: list(_time_lines(block, nodes)) for nodes in block.nodes}
    panels = {nodes: lines for nodes, lines in panels.items() if lines}
    if not panels:
        raise NothingToShowError("The times of single iterations were not recorded.")
    figure = _draw_panels(
        block, panels, "Time of each iteration", "seconds, on rank 0", narrow=narrow
    )
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _time_lines(block: ComparisonGroup, nodes: int) -> Iterator[DrawnLine]:
    """Yield the first run of each strategy, and of a single rank."""
    rows = block.at(nodes)
    if block.baseline and nodes > 1:
        rows = [block.baseline, *rows]
    for row in rows:
        times = next((dict(run.step_seconds) for run in row.runs if run.step_seconds), {})
        times.pop(1, None)
        look = {"color": color(row.sync), "linewidth": 1.4}
        label = row.sync
        if row.nodes == 1:
            look["linestyle"] = _DOTTED
            label = f"{row.sync} (1 {block.alone})"
        if times:
            yield DrawnLine(label, times, look)


def draw_ranks(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw step and speed-up over the number of ranks, a line for each strategy."""
    numbers = sorted({row.nodes for row in block.measured})
    if len(numbers) < 2:
        raise NothingToShowError(
            f"No curve: all runs have {count(max(numbers, default=0), block.place)}."
        )
    figure, axes = grid(
        2 if block.baseline else 1,
        narrow=narrow,
        columns=1 if narrow else 2,
        height=2.7,
        extra=0.7,
    )
    places = f"number of {block.place}s{block.each}"
    for sync in block.syncs:
        rows = [row for row in block.measured if row.sync == sync]
        if block.baseline:
            rows = [block.baseline, *rows]
        _draw_points(axes[0], sync, {row.nodes: row.step for row in rows})
        speedups = {row.nodes: row.speedup for row in rows if row.speedup is not None}
        if block.baseline:
            _draw_points(axes[1], sync, speedups)
    axes[0].set_ylabel("seconds a step")
    handles, _ = axes[0].get_legend_handles_labels()
    if block.baseline:
        ranks = [1 if nodes == 1 else nodes * block.ranks_per_node for nodes in numbers]
        axes[1].plot(numbers, ranks, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes[1].set_ylabel("speed-up")
        handles.append(line_key("ideal", linewidth=1, linestyle=(0, (4, 3))))
    for axis in axes:
        axis.set(xlabel=places, xticks=numbers)
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.grid()
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if narrow else 4)
    title(figure, f"Step and speed-up over the {places}", emulated=block.emulated)
    return figure


def _draw_points(axis: Axes, sync: str, values: Mapping[int, float]) -> None:
    numbers = sorted(values)
    axis.plot(
        numbers,
        [values[number] for number in numbers],
        color=color(sync),
        marker=marker(sync),
        label=sync,
        linewidth=1.4,
    )


def _draw_line(axis: Axes, line: DrawnLine) -> Line2D:
    steps, values = zip(*sorted(line.values.items()), strict=True)
    point = "." if len(steps) == 1 else None  # a line of one point is invisible
    (drawn,) = axis.plot(steps, values, marker=point, label=line.label, **line.look)
    return drawn


def _coincide(found: Curves) -> bool:
    """Return whether there are several curves, and nobody could see a difference between them."""
    values = [loss for curve in found.values() for loss in curve.values()]
    most = max(differences(found), default=None)
    return most is not None and most <= _ONE_LINE * (max(values) - min(values))


def _lines(block: ComparisonGroup, nodes: int) -> Iterator[DrawnLine]:
    """Yield the lines of a panel: one rank's, if its batches are the same, exact ones, the rest."""
    rows = block.at(nodes)
    found = curves(rows)
    if block.baseline and nodes > 1 and not block.weak:
        found = curves([*rows, block.baseline])
        if "none" in found:
            look = {"color": color("none"), "linewidth": 1.2, "linestyle": _DOTTED}
            yield DrawnLine(f"none (1 {block.alone})", found["none"], look)
    known = [row for row in rows if row.sync in found]
    yield from _exact_lines([row for row in known if row.exact], found)
    lossy = [row.sync for row in known if not row.exact]
    for sync, dashes in zip(lossy, cycle(DASHES), strict=False):
        look = {"color": color(sync), "linewidth": 1.6, "linestyle": dashes}
        yield DrawnLine(f"{sync} (not exact)", found[sync], look)


def _exact_lines(rows: Rows, found: Curves) -> Iterator[DrawnLine]:
    """Yield one line for all right strategies where they look alike, and one for each other."""
    apart = rows
    right = {row.sync: found[row.sync] for row in rows if not row.claim.wrong}
    if _coincide(right):
        apart = [row for row in rows if row.claim.wrong]
        others = "other " if apart else ""
        longest = max(right.values(), key=len)
        look = {"color": INK, "linewidth": 1.8}
        label = f"the {len(right)} {others}strategies that claim to be exact"
        yield DrawnLine(label, longest, look)
    for index, row in enumerate(apart):
        width = 1.8
        if len(apart) > 1:
            width = max(1.0, 3.2 - 0.5 * index)
        label = f"✗ {row.sync}" if row.claim.wrong else row.sync
        yield DrawnLine(label, found[row.sync], {"color": color(row.sync), "linewidth": width})
