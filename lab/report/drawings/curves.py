"""The figures of lines: loss and time over the steps, time and speed-up over the number of ranks.

As in ``lab.report.drawings.figures``, each ``draw_*`` returns the figure of a block, or raises
NothingToShowError with a sentence for the page if there is nothing to show.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
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
from lab.report.claims import wrong_rows
from lab.report.losses import Curves, curves, differences
from lab.report.view import CellRow, ComparisonGroup, Rows, small_text
from lab.strategy_style import color, marker

_ONE_LINE = 0.01  # of the axis: losses closer than this look like one line
_MOST_PANELS = 12
_DOTTED = (0, (1, 1.5))  # the line of a single rank
_LOSS_AXIS = "training loss (global batch)"


class DrawnLine(NamedTuple):
    """A line of a panel; ``values`` by step."""

    label: str
    values: Mapping[int, float]
    look: dict[str, Any]


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps.

    A panel shows a number of ranks, inexact strategies dashed; or, where no two lines would be
    apart, a single strategy.
    """
    found = _losses(block)
    if _own_panels(block, found):
        return _draw_apart(block, found, narrow=narrow)
    panels = {nodes: list(_lines(block, nodes)) for nodes in found}
    return _draw_panels(block, panels, "Loss over steps", _LOSS_AXIS, narrow=narrow)


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
        _label_panel(axis, block.size_text(nodes))
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


def _label_panel(axis: Axes, heading: str) -> None:
    axis.set(xlabel="step", title=heading)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.grid()


def _losses(block: ComparisonGroup) -> dict[int, Curves]:
    """Return the losses by number of ranks; NothingToShowError if there are none."""
    found = {nodes: lines for nodes in block.nodes if (lines := curves(block.at(nodes)))}
    if not found and block.emulated_compute:
        raise NothingToShowError("No figure, because compute was emulated: nothing was learned.")
    if not found:
        raise NothingToShowError("No cell has recorded its losses yet.")
    return found


def _own_panels(block: ComparisonGroup, found: Mapping[int, Curves]) -> bool:
    """Return whether each strategy gets a panel, because its line would hide behind another."""
    few = sum(map(len, found.values())) < _MOST_PANELS
    return few and all(map(_coincide, found.values()))


def _draw_apart(block: ComparisonGroup, found: Mapping[int, Curves], *, narrow: bool) -> Figure:
    """Draw each strategy on each number of ranks in a panel of its own, with the same axes."""
    panels = [
        (f"{sync}, {block.size_text(nodes)}", color(sync), losses)
        for nodes, by_sync in found.items()
        for sync, losses in by_sync.items()
    ]
    if block.baseline and 1 not in found:
        alone = curves([block.baseline]).items()
        panels = [(f"{sync}, 1 {block.alone}", INK, losses) for sync, losses in alone] + panels
    figure, axes = grid(
        len(panels),
        narrow=narrow,
        columns=2 if narrow else 3,
        height=1.9,
        extra=0.4,
        sharex=True,
        sharey=True,
    )
    for axis, (heading, line_color, losses) in zip(axes, panels, strict=True):
        _draw_line(axis, DrawnLine(heading, losses, {"color": line_color, "linewidth": 1.4}))
        _label_panel(axis, heading)
        axis.tick_params(labelbottom=True)
    figure.supylabel(_LOSS_AXIS, fontsize=9)
    title(figure, "Loss over steps, each strategy by itself", emulated=block.emulated)
    return figure


def loss_caption(block: ComparisonGroup) -> str:
    """Return what the figure of losses shows, and how far lines that coincide are apart."""
    text = "Training loss over the global batch, of one seed. "
    try:
        found = _losses(block)
    except NothingToShowError:
        return text
    if not _own_panels(block, found):
        return text + (
            "Strategies that claim to be exact must have the same loss; they are drawn as one line "
            "where no difference is visible. The others are dashed."
        )
    words = "; ".join(
        _in_words(block.size_text(nodes), by_sync) for nodes, by_sync in found.items()
    )
    return f"{text}The lines lie on top of each other, so each has a panel: {words}."


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
    places = f"number of {block.place}s"
    if block.ranks_per_node > 1:
        places += f" with {block.ranks_per_node} ranks each"
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


def _in_words(where: str, found: Curves) -> str:
    """Return what coinciding curves show."""
    curve = next(iter(found.values()))
    most = max(differences(found))
    apart = f"differ by at most {small_text(most)}" if most else "have the same loss at every step"
    return (
        f"on {where} the loss goes from {curve[min(curve)]:.3f} to "
        f"{curve[max(curve)]:.3f} in {len(curve)} steps, and the {len(found)} strategies {apart}"
    )


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
    yield from _exact_lines([row for row in known if row.exact], found, wrong_rows(block))
    lossy = [row.sync for row in known if not row.exact]
    for sync, dashes in zip(lossy, cycle(DASHES), strict=False):
        look = {"color": color(sync), "linewidth": 1.6, "linestyle": dashes}
        yield DrawnLine(f"{sync} (not exact)", found[sync], look)


def _exact_lines(rows: Rows, found: Curves, wrong: Set[CellRow]) -> Iterator[DrawnLine]:
    """Yield one line for all right strategies where they look alike, and one for each other."""
    apart = rows
    right = {row.sync: found[row.sync] for row in rows if row not in wrong}
    if _coincide(right):
        apart = [row for row in rows if row in wrong]
        others = "other " if apart else ""
        longest = max(right.values(), key=len)
        look = {"color": INK, "linewidth": 1.8}
        label = f"the {len(right)} {others}strategies that claim to be exact"
        yield DrawnLine(label, longest, look)
    for index, row in enumerate(apart):
        width = 1.8
        if len(apart) > 1:
            width = max(1.0, 3.2 - 0.5 * index)
        label = f"✗ {row.sync}" if row in wrong else row.sync
        yield DrawnLine(label, found[row.sync], {"color": color(row.sync), "linewidth": width})
