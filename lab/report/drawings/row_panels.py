"""Panels of rows: a panel for each number of nodes, a row for each strategy."""

from collections.abc import Callable, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lab.plot_style import INK, PAPER, color, grid
from lab.report.equality import wrong_rows
from lab.report.view import CellRow, ComparisonGroup, nodes_text

_ROW = 0.235  # inches per bar with its gap
_EQUAL = 0.01  # values that differ by no more than this share are called equal


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

    ``draw(axes, y, row)`` draws a row. A cell without numbers says why in its row; a strategy with
    a wrong result has a cross before its name. With ``baseline``, the one-node cell stands first
    in every panel. ``right`` is the largest x value.
    """
    one = block.find("none", 1) if baseline and block.nodes != [1] else None
    wrong_ids = wrong_rows(block)
    wrong = {row.sync for row in block.rows if row.id in wrong_ids}
    names = [f"✗ {sync}" if sync in wrong else sync for sync in block.syncs]
    labels = (["none (1 node)"] if one else []) + names
    columns = 1 if narrow else 2 if len(block.nodes) in (2, 4) else 3
    figure, axes = grid(
        len(block.nodes),
        narrow=narrow,
        columns=columns,
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
                note(axis, y, "not run" if row is None else row.status)
        axis.set(title=nodes_text(nodes), xlabel=xlabel, ylim=(len(labels) - 0.4, -0.6))
        if right is not None:
            axis.set_xlim(0, right * 1.03)
            axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_yticks(range(len(labels)), labels)
        axis.tick_params(axis="y", length=0, labelleft=index % columns == 0)
        axis.tick_params(labelbottom=True)
        if one:
            axis.axhline(0.5, color=INK, linewidth=0.6, alpha=0.35)
        axis.grid(axis="x")
    return figure, axes


def write_value(axis: Axes, y: float, text: str) -> None:
    """Write a row's value in the column right of the panel, where no mark can be."""
    axis.annotate(
        text,
        (1.02, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def note(axis: Axes, y: float, text: str) -> None:
    """Write into a row why it has no numbers."""
    axis.annotate(
        text,
        (0, y),
        xytext=(6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=8,
        style="italic",
    )


def hollow(axis: Axes, x: float, y: float, sync: str, *, marker: str, markersize: float) -> None:
    axis.plot(
        x,
        y,
        marker=marker,
        markersize=markersize,
        markerfacecolor=PAPER,
        markeredgecolor=color(sync),
        markeredgewidth=1.4,
        zorder=3,
    )


def equal_in_each_panel(
    rows: Sequence[CellRow], values: Callable[[CellRow], Sequence[float]]
) -> list[tuple[int, float]]:
    """Return each number of nodes and its mean value if all its rows agree, else an empty list."""
    found = []
    for nodes in sorted({row.nodes for row in rows}):
        panel = [row for row in rows if row.nodes == nodes]
        numbers = [value for row in panel for value in values(row)]
        if max(numbers) - min(numbers) > _EQUAL * max(numbers):
            return []
        found.append((nodes, fmean(numbers)))
    return found
