"""The figure of lines: the loss over the steps.

As in ``lab.report.drawings.figures``, ``draw_loss`` returns the figure of a block, or raises
NothingToShowError with a sentence for the page if there is nothing to compare.
"""

from collections.abc import Iterator, Mapping, Set
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from common.errors import count
from lab.plot_style import DASHES, INK, NothingToShowError, color, grid, title
from lab.report.equality import wrong_rows
from lab.report.losses import Curves, curves, differences
from lab.report.view import CellRow, ComparisonGroup, Rows, small_text

_ONE_LINE = 0.01  # of the axis: losses closer than this look like one line


class LossLine(NamedTuple):
    """A line of a panel; ``losses`` by step."""

    label: str
    losses: Mapping[int, float]
    look: dict[str, Any]


def draw_loss(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the loss over the steps, with a panel per number of nodes; inexact strategies dashed."""
    panels = _numbers_of_nodes(block)
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
        for line in _lines(block, nodes):
            handles.setdefault(line.label, _draw_line(axis, line))
        axis.set(xlabel="step", title=count(nodes, block.place))
        if narrow or index % 2 == 0:
            axis.set_ylabel("training loss (global batch)")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid()
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=1 if narrow else 3,
        handlelength=3,
    )
    title(figure, "Loss over steps", emulated=block.emulated)
    return figure


def _numbers_of_nodes(block: ComparisonGroup) -> list[int]:
    """Return the numbers of nodes that have losses; NothingToShowError if no line is apart."""
    panels = {nodes: found for nodes in block.nodes if (found := curves(block.at(nodes)))}
    if not panels and block.emulated_compute:
        raise NothingToShowError("No figure, because compute was emulated: nothing was learned.")
    if not panels:
        raise NothingToShowError("No cell has recorded its losses yet.")
    if all(map(_coincide, panels.values())):
        texts = "; ".join(_in_words(nodes, found) for nodes, found in panels.items())
        raise NothingToShowError(
            f"No figure, because the lines would lie on top of each other: {texts}."
        )
    return list(panels)


def _draw_line(axis: Axes, line: LossLine) -> Line2D:
    steps, losses = zip(*sorted(line.losses.items()), strict=True)
    marker = "." if len(steps) == 1 else None  # a line of one point is invisible
    (drawn,) = axis.plot(steps, losses, marker=marker, label=line.label, **line.look)
    return drawn


def _coincide(found: Curves) -> bool:
    """Return whether there are several curves, and nobody could see a difference between them."""
    values = [loss for curve in found.values() for loss in curve.values()]
    most = max(differences(found), default=None)
    return most is not None and most.value <= _ONE_LINE * (max(values) - min(values))


def _in_words(nodes: int, found: Curves) -> str:
    """Return what a panel of coinciding curves would show."""
    curve = next(iter(found.values()))
    most = small_text(max(differences(found)).value)
    return (
        f"on {count(nodes, 'node')} the loss goes from {curve[min(curve)]:.3f} to "
        f"{curve[max(curve)]:.3f} in {len(curve)} steps, and the {len(found)} strategies differ "
        f"by at most {most}"
    )


def _lines(block: ComparisonGroup, nodes: int) -> Iterator[LossLine]:
    """Yield the lines of a panel: one node's, if its batches are the same, exact ones, the rest."""
    rows = block.at(nodes)
    found = curves(rows)
    if block.baseline and nodes > 1 and not block.weak:
        found = curves([*rows, block.baseline])
        if "none" in found:
            look = {"color": color("none"), "linewidth": 1.2, "linestyle": (0, (1, 1.5))}
            yield LossLine(f"none (1 {block.place})", found["none"], look)
    known = [row for row in rows if row.sync in found]
    yield from _exact_lines([row for row in known if row.exact], found, wrong_rows(block))
    lossy = [row.sync for row in known if not row.exact]
    for sync, dashes in zip(lossy, cycle(DASHES), strict=False):
        look = {"color": color(sync), "linewidth": 1.6, "linestyle": dashes}
        yield LossLine(f"{sync} (not exact)", found[sync], look)


def _exact_lines(rows: Rows, found: Curves, wrong: Set[CellRow]) -> Iterator[LossLine]:
    """Yield one line for all right strategies where they look alike, and one for each other."""
    apart = rows
    right = {row.sync: found[row.sync] for row in rows if row not in wrong}
    if _coincide(right):
        apart = [row for row in rows if row in wrong]
        what = "compute the same" if apart else "claim to be exact"
        longest = max(right.values(), key=len)
        look = {"color": INK, "linewidth": 1.8}
        yield LossLine(f"the {len(right)} strategies that {what}", longest, look)
    for index, row in enumerate(apart):
        width = 1.8
        if len(apart) > 1:
            width = max(1.0, 3.2 - 0.5 * index)
        label = f"✗ {row.sync}" if row in wrong else row.sync
        yield LossLine(label, found[row.sync], {"color": color(row.sync), "linewidth": width})
