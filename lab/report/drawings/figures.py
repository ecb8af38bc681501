"""The figures of time: step time by section, efficiency, predicted step time.

They have a panel for each number of nodes and a row for each strategy. Each ``draw_*`` returns the
figure of a block for a wide or a narrow page. It raises NothingToShowError with a sentence for the
page if the figure would be empty, or if all its values are equal.
``lab.report.drawings.cost_figures`` has bytes and memory, ``lab.report.drawings.curves`` the loss.
"""

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    color,
    line_key,
    section_patch,
    section_style,
    title,
)
from lab.report.drawings.row_panels import hollow, note, row_panels, write_value
from lab.report.view import CellRow, ComparisonGroup, percent, seconds_text

_IDEAL, _ONE_NODE, _OUT_OF_SCOPE = (0, (4, 3)), (0, (1, 1.5)), (0, (1, 1.5))


def draw_step_time(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each step by section up to its median, with its 95 % interval."""
    if not block.measured:
        raise NothingToShowError("Nothing is measured yet.")
    right = axis_end(block)
    split = all(row.median("wait") is not None for row in block.measured)
    hidden = "sync" if split else ""
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
            *(section_patch(name) for name in (*SECTIONS, "rest") if name != hidden),
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


def section_spans(row: CellRow) -> list[tuple[str, float, float]]:
    """Return name, begin and end in seconds of each section, one after the other.

    The last one, ``rest``, ends at the step's median, and is missing if the sections reach it.
    """
    split = row.median("wait") is not None and row.median("wire") is not None
    hidden = ("sync",) if split else ("wait", "wire")
    found, left = [], 0.0
    for name in SECTIONS:
        seconds = row.median(name)
        if seconds and name not in hidden:
            found.append((name, left, left + seconds))
            left += seconds
    if left < row.measured_step:
        found.append(("rest", left, row.measured_step))
    return found


def _stack(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    step = row.measured_step
    for name, begin, end in section_spans(row):
        # what lies beyond the step's own median is drawn pale: the sections sum up to more
        for low, high, alpha in ((begin, min(end, step), None), (max(begin, step), end, 0.35)):
            if high > low:
                look = section_style(name) | ({"alpha": alpha} if alpha else {})
                axis.barh(y, high - low, left=low, height=0.7, **look)
    low, high = row.interval("step") or (step, step)
    low, high = max(low, 0.0), min(high, right)
    axis.plot([step] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
    axis.plot([low, high], [y, y], color=INK, linewidth=1.2)
    write_value(axis, y, f"{seconds_text(step, step)} s")


def draw_scaling(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each cell's efficiency with its interval; the speed-up stands beside it."""
    if block.baseline is None:
        raise NothingToShowError("Without a measured cell of one node there is no speed-up.")
    efficiencies = [row.efficiency for row in block.measured if row.nodes > 1 and row.efficiency]
    if not efficiencies:
        raise NothingToShowError("No cell on more than one node is measured yet.")
    right = max(1.0, min(2.0, max([*efficiencies, *_efficiency_ends(block)])))
    figure, axes = row_panels(
        block,
        narrow=narrow,
        draw=partial(_efficiency_dot, right=right),
        xlabel="efficiency",
        right=right,
        baseline=False,
        extra=0.5 if narrow else 0.35,
    )
    for axis, nodes in zip(axes, block.nodes, strict=True):
        axis.xaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
        axis.axvline(1, color=INK, linewidth=1, linestyle=_IDEAL)
        axis.axvline(1 / nodes, color=INK, linewidth=1, linestyle=_ONE_NODE)
    figure.legend(
        handles=[
            line_key("ideal: N nodes are N times as fast", linewidth=1, linestyle=_IDEAL),
            line_key("as fast as one node", linewidth=1, linestyle=_ONE_NODE),
        ],
        loc="outside lower center",
        ncols=1 if narrow else 2,
        handlelength=2.5,
    )
    weak = " (weak scaling)" if block.scaling == "weak" else ""
    title(figure, f"Speed-up and efficiency{weak}", emulated=block.emulated)
    return figure


def _efficiency_ends(block: ComparisonGroup) -> Iterator[float]:
    for row in block.measured:
        if row.nodes > 1 and row.speedup_interval:
            yield row.speedup_interval[1] / row.nodes


def _efficiency_dot(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    if row.speedup is None:
        note(axis, y, "no speed-up")
        return
    ends = row.speedup_interval or (row.speedup, row.speedup)
    low, middle, high = (min(each / row.nodes, right) for each in (ends[0], row.speedup, ends[1]))
    axis.plot([low, high], [y, y], color=color(row.sync), linewidth=1.6)
    axis.plot(middle, y, marker="o", markersize=6, color=color(row.sync))
    write_value(axis, y, f"{row.speedup:.2f} times")


def draw_prediction(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the predicted and the measured step of each cell, joined by a line, and the error."""
    rows = [row for row in block.measured if row.predicted]
    if not rows:
        raise NothingToShowError("No cell has both a prediction and a measurement.")
    right = max(axis_end(block), *(row.predicted or 0.0 for row in rows))
    figure, _ = row_panels(
        block,
        narrow=narrow,
        draw=partial(_predicted_row, right=right),
        xlabel="seconds a step",
        right=right,
        extra=0.55 if narrow else 0.35,
    )
    figure.legend(
        handles=[
            line_key("predicted", linestyle="", marker="D", markersize=6, markerfacecolor=PAPER),
            line_key("measured, 95 % interval", linewidth=1.2, marker="o", markersize=5),
            line_key("out of the model's scope", linewidth=1.2, linestyle=_OUT_OF_SCOPE),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 3,
    )
    title(figure, "Predicted and measured step time", emulated=block.emulated)
    return figure


def _predicted_row(axis: Axes, y: float, row: CellRow, *, right: float) -> None:
    step, predicted = row.measured_step, row.predicted
    low, high = row.interval("step") or (step, step)
    low, high = max(low, 0.0), min(high, right)
    axis.plot([low, high], [y, y], color=color(row.sync), linewidth=1.2)
    axis.plot(step, y, marker="o", markersize=5, color=color(row.sync), zorder=4)
    if predicted is None or row.error is None:
        write_value(axis, y, "not predicted")
        return
    axis.plot(
        [predicted, step],
        [y, y],
        color=color(row.sync),
        linewidth=2.4,
        linestyle="-" if row.in_scope else _OUT_OF_SCOPE,
        alpha=0.6,
    )
    hollow(axis, predicted, y, row.sync, marker="D", markersize=6)
    write_value(axis, y, percent(row.error, signed=True))
