"""The figures of what a strategy costs besides time: bytes sent, peak memory, tensors by kind.

As in ``lab.report.drawings.figures``, each ``draw_*`` returns the figure of a block, or raises
NothingToShowError with a sentence for the page if there is nothing to compare.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from common.profiling.records import KINDS
from lab.plot_style import INK, PAPER, NothingToShowError, color, line_key, title
from lab.report.drawings.row_panels import (
    equal_in_each_panel,
    hollow,
    note,
    row_panels,
    write_value,
)
from lab.report.view import CellRow, ComparisonGroup, nodes_text

MB = 1e6
_LOOKS: dict[str, dict[str, Any]] = {
    "parameters": {"alpha": 1.0},
    "gradients": {"alpha": 0.65},
    "optimizer_state": {"alpha": 0.4, "hatch": "////"},
    "buckets": {"alpha": 0.4, "hatch": "...."},
    "untrained": {"alpha": 0.2},
}


def draw_bytes(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the bytes that the root and each other rank send per step, joined by a line."""
    values = _values_that_differ(
        [row for row in block.measured if row.nodes > 1],
        _sent,
        missing="No cell on more than one node has counted its bytes yet.",
        alike="every rank of every strategy sends the same",
        form="{:,.1f} MB a step",
    )
    positive = [value for value in values if value > 0]
    log = bool(positive) and max(positive) / min(positive) > 15
    floor = min(positive) / 2 if log else 0.0
    figure, axes = row_panels(
        block,
        narrow=narrow,
        draw=partial(_bytes_row, floor=floor),
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
    """Return the MB that the root and the others send, as far as they were counted."""
    names = ("root_bytes_sent", "others_bytes_sent")
    return [value / MB for name in names if (value := row.median(name)) is not None]


def _bytes_row(axis: Axes, y: float, row: CellRow, *, floor: float) -> None:
    sent = [max(value, floor) for value in _sent(row)]
    if not sent:
        note(axis, y, "bytes not counted")
        return
    axis.plot(sent, [y] * len(sent), color=color(row.sync), linewidth=2, alpha=0.6, zorder=2)
    if len(sent) > 1:
        hollow(axis, sent[1], y, row.sync, marker="o", markersize=9.5)
    # equal values: the square lies within the circle
    axis.plot(sent[0], y, marker="s", markersize=5, color=color(row.sync), zorder=4)


def draw_memory(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw peak memory: a bar to the mean over the ranks, a tick at the largest."""
    right = max(
        _values_that_differ(
            block.measured,
            _peak_memory,
            missing="No cell has recorded its memory yet.",
            alike="all ranks of all strategies need the same (within 1 %)",
            form="{:,.0f} MB",
        )
    )
    figure, _ = row_panels(
        block,
        narrow=narrow,
        draw=partial(_memory_bar, right=right),
        xlabel="peak memory of a rank, MB",
        right=right,
        extra=0.25,
    )
    title(figure, "Peak memory of a rank", emulated=block.emulated)
    return figure


def _peak_memory(row: CellRow) -> tuple[float, ...]:
    """Return the mean and the largest peak memory of the ranks in MB, nothing if not recorded."""
    mean = row.median("peak_memory_bytes")
    return (mean / MB, max([mean, *row.per_rank("peak_memory_bytes")]) / MB) if mean else ()


def _memory_bar(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    peak = _peak_memory(row)
    if not peak:
        note(axis, y, "not recorded")
        return
    mean, most = peak
    axis.barh(y, mean, height=0.7, color=color(row.sync))
    axis.plot([most] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
    write_value(axis, y, f"{mean:,.0f} MB")


def draw_tensors(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the tensors of the rank that holds most, by kind, and the predicted sum."""
    right = max(
        _values_that_differ(
            block.measured,
            _tensors,
            missing="No cell has recorded its tensors yet.",
            alike="the ranks of all strategies hold the same (within 1 %)",
            form="{:,.1f} MB",
        )
    )
    figure, _ = row_panels(
        block,
        narrow=narrow,
        draw=_tensor_bars,
        xlabel="tensors of a rank, MB",
        right=right,
        extra=0.75 if narrow else 0.55,
    )
    figure.legend(
        handles=[
            *(Patch(facecolor=INK, label=name, **_LOOKS[kind]) for kind, name in KINDS.items()),
            line_key("predicted", linestyle="", marker="D", markersize=6, markerfacecolor=PAPER),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 3,
    )
    title(figure, "Tensors of a rank, by kind", emulated=block.emulated)
    return figure


def _tensors(row: CellRow) -> list[float]:
    """Return the measured and the predicted MB of all kinds together, as far as they are known."""
    return [
        sum(known.values()) / MB for known in (row.memory(), row.memory(predicted=True)) if known
    ]


def _tensor_bars(axis: Axes, y: float, row: CellRow) -> None:
    if not _tensors(row):
        note(axis, y, "not recorded")
        return
    left = 0.0
    known = row.memory() or row.memory(predicted=True)
    for kind, look in _LOOKS.items():
        width = known[kind] / MB
        axis.barh(y, width, left=left, height=0.7, color=color(row.sync), **look)
        left += width
    if row.memory(predicted=True):
        predicted = sum(row.memory(predicted=True).values()) / MB
        hollow(axis, predicted, y, row.sync, marker="D", markersize=6)
    write_value(axis, y, f"{left:,.1f} MB")


def _values_that_differ(
    rows: Sequence[CellRow],
    values_of: Callable[[CellRow], Sequence[float]],
    *,
    missing: str,
    alike: str,
    form: str,
) -> list[float]:
    """Return all values of all rows. Raises NothingToShowError if there are none, or all are equal.

    missing, alike : what to say then. form : of a value.
    """
    rows = [row for row in rows if values_of(row)]
    if not rows:
        raise NothingToShowError(missing)
    if same := equal_in_each_panel(rows, values_of):
        each = [f"{form.format(value)} on {nodes_text(nodes)}" for nodes, value in same]
        raise NothingToShowError(f"No figure, because {alike}: {'; '.join(each)}.")
    return [value for row in rows for value in values_of(row)]
