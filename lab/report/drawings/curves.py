"""The figure of lines: the loss over the steps.

As in ``lab.report.drawings.figures``, ``draw_loss`` returns the figure of a block, or raises
NothingToShowError with a sentence for the page if there is nothing to compare.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from statistics import mode
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lab.plot_style import DASHES, INK, NothingToShowError, color, grid, title
from lab.report.equality import wrong_rows
from lab.report.losses import by_seed, largest_difference
from lab.report.view import CellRow, ComparisonGroup, nodes_text, small_text

_ONE_LINE = 0.01  # of the axis: losses closer than this look like one line


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps, with a panel per number of nodes; inexact strategies dashed."""
    panels = [nodes for nodes in block.nodes if any(by_seed(row) for row in block.at(nodes))]
    if not panels:
        raise NothingToShowError(
            "No figure, because compute was emulated: nothing was learned."
            if block.emulated_compute
            else "No cell has recorded its losses yet."
        )
    if all(_coincide(block.at(nodes)) for nodes in panels):
        raise NothingToShowError(_equal_losses(block, panels))
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


def _coincide(rows: list[CellRow]) -> bool:
    """Return whether several rows have losses, and nobody could see a difference between them."""
    values = [loss for row in rows for curve in by_seed(row).values() for loss in curve.values()]
    most = largest_difference(rows)
    return most is not None and most.value <= _ONE_LINE * (max(values) - min(values))


def _equal_losses(block: ComparisonGroup, panels: list[int]) -> str:
    """Return the sentence that replaces the figure if the strategies have the same losses."""
    parts = []
    for nodes in panels:
        rows = [row for row in block.at(nodes) if by_seed(row)]
        curve = min(by_seed(rows[0]).items())[1]
        most = largest_difference(rows)
        apart = f"by at most {small_text(most.value)}" if most and most.value else ""
        parts.append(
            f"on {nodes_text(nodes)} the loss goes from {curve[min(curve)]:.3f} to "
            f"{curve[max(curve)]:.3f} in {len(curve)} steps, and the {len(rows)} strategies "
            f"{f'differ {apart}' if apart else 'do not differ'}"
        )
    return f"No figure, because the lines would lie on top of each other: {'; '.join(parts)}."


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
    wrong = wrong_rows(block)
    right = [row for row in exact if row.id not in wrong]
    apart = exact
    if _coincide(right):
        apart = [row for row in exact if row.id in wrong]
        longest = max((curves[row.sync] for row in right), key=len)
        what = "compute the same" if apart else "claim to be exact"
        label = f"the {len(right)} strategies that {what}"
        yield _line(axis, longest, label=label, color=INK, linewidth=1.8)
    for index, row in enumerate(apart):
        yield _line(
            axis,
            curves[row.sync],
            label=f"✗ {row.sync}" if row.id in wrong else row.sync,
            color=color(row.sync),
            linewidth=max(1.0, 3.2 - 0.5 * index) if len(apart) > 1 else 1.8,
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
