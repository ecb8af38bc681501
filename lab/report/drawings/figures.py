"""The figures of rows: step time by section, efficiency, bytes sent.

They have a panel for each number of nodes and a row for each strategy. Each ``draw_*`` returns the
figure of a block for a wide or a narrow page. It raises NothingToShowError with a sentence for the
page if the figure would be empty, or if all its values are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from msgspec.structs import asdict

from common.say import count, factor_text
from common.utils.grouping import grouped
from lab.plot_style import (
    INK,
    PAPER,
    SECTIONS,
    NothingToShowError,
    grid,
    line_key,
    section_patch,
    section_style,
    title,
)
from lab.report.view import CellRow, ComparisonGroup, seconds_text
from lab.strategy_style import color

_ROW = 0.235  # inches per bar with its gap
_EQUAL = 0.01  # values that differ by no more than this share are called equal
_IDEAL = (0, (4, 3))
_ONE_NODE = (0, (1, 1.5))
# the square lies within the circle where both send the same
_ROOT: dict[str, Any] = {"marker": "s", "markersize": 5, "zorder": 4}
_OTHERS: dict[str, Any] = {
    "marker": "o",
    "markersize": 9.5,
    "markerfacecolor": PAPER,
    "markeredgewidth": 1.4,
    "zorder": 3,
}
_LOOKS_OF_RANKS = {"root (rank 0)": _ROOT, "each of the others (mean)": _OTHERS}
_LOOKS_OF_LINKS = {"measured, with headers": _ROOT, "by the plan": _OTHERS}


def draw_step_time(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each step by section up to its mean over the repeats, with its 95 % interval."""
    if not block.measured:
        raise NothingToShowError("Nothing is measured yet.")
    longest = max(row.step for row in block.measured)
    right = min(1.5 * longest, max(_high_end(row) for row in block.measured))

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        for name, begin, end in section_spans(row):
            style = section_style(name)
            if begin >= row.step:  # the sections sum up to more than the step
                style["alpha"] = 0.35
            axis.barh(y, end - begin, left=begin, height=0.7, **style)
        low, high = row.interval("step") or (row.step, row.step)
        axis.plot([row.step, row.step], [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
        axis.plot([low, min(high, right)], [y, y], color=INK, linewidth=1.2)
        _write(axis, y, f"{seconds_text(row.step, row.step)} s")

    panels = _Panels(block, narrow=narrow, baseline=True, extra=0.75 if narrow else 0.55)
    panels.fill(draw, xlabel="seconds a step", limits=(0, right * 1.03))
    title(panels.figure, "Time of a step, by section", emulated=block.emulated)
    panels.figure.legend(
        handles=[
            *map(section_patch, (*SECTIONS, "rest")),
            line_key("mean, 95 % interval", linewidth=1.2, marker="|", markersize=6),
        ],
        loc="outside lower center",
        ncols=2 if narrow else 4,
        handlelength=1.4,
        columnspacing=1.2,
    )
    return panels.figure


def _high_end(row: CellRow) -> float:
    """Return where a row's interval ends, or its step without one."""
    _, high = row.interval("step") or (row.step, row.step)
    return max(row.step, high)


def section_spans(row: CellRow) -> list[tuple[str, float, float]]:
    """Return name, begin and end in seconds of each section, one after the other.

    The last one, ``rest``, ends at the step's end, and is missing if the sections reach it. A
    section that goes beyond is cut in two there. What the strategy computes in sync is a part of
    "wire" where it is not separated.
    """
    own = row.own_work or 0.0
    seconds = asdict(row.medians) | {"own": own, "wire": row.medians.wire - own}
    spans = []
    begin = 0.0
    for name in SECTIONS:
        end = begin + seconds[name]
        spans.append((name, begin, min(end, row.step)))
        spans.append((name, max(begin, row.step), end))
        begin = end
    spans.append(("rest", begin, row.step))
    return [(name, begin, end) for name, begin, end in spans if end > begin]


def draw_scaling(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw each cell's efficiency with its interval, and the speed-up at the right."""
    right = _efficiency_limit(block)

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        speedup = row.speedup or 0.0
        ends = row.speedup_interval or (speedup, speedup)
        low, middle, high = (min(each / row.ranks, right) for each in (ends[0], speedup, ends[1]))
        axis.plot([low, high], [y, y], color=color(row.sync), linewidth=1.6)
        axis.plot(middle, y, marker="o", markersize=6, color=color(row.sync))
        _write(axis, y, f"{factor_text(speedup)} times")

    panels = _Panels(block, narrow=narrow, baseline=False, extra=0.5 if narrow else 0.35)
    panels.fill(draw, xlabel="efficiency", limits=(0, right * 1.03))
    for axis, nodes in zip(panels.axes, block.nodes, strict=True):
        axis.xaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
        axis.axvline(1, color=INK, linewidth=1, linestyle=_IDEAL)
        axis.axvline(
            1 / (nodes * block.ranks_per_node), color=INK, linewidth=1, linestyle=_ONE_NODE
        )
    heading = "Speed-up and efficiency"
    if block.weak:
        heading += " (weak scaling)"
    title(panels.figure, heading, emulated=block.emulated)
    panels.figure.legend(
        handles=[
            line_key(f"ideal: N {block.alone}s are N times as fast", linewidth=1, linestyle=_IDEAL),
            line_key(f"as fast as one {block.alone}", linewidth=1, linestyle=_ONE_NODE),
        ],
        loc="outside lower center",
        ncols=1 if narrow else 2,
        handlelength=2.5,
    )
    return panels.figure


def _efficiency_limit(block: ComparisonGroup) -> float:
    """Return where the axis of efficiencies ends: at 1 to 2."""
    highest = []
    for row in block.measured:
        if row.nodes > 1 and row.efficiency:
            highest.append(row.efficiency)
            if row.speedup_interval:
                highest.append(row.speedup_interval[1] / row.ranks)
    if highest:
        return max(1.0, min(2.0, max(highest)))
    if block.baseline:
        raise NothingToShowError(f"No cell on more than one {block.place} is measured yet.")
    raise NothingToShowError(f"Without a measured cell of one {block.alone} there is no speed-up.")


def draw_bytes(block: ComparisonGroup, *, narrow: bool) -> Figure:
    """Draw the MB that the root and each other rank send per step, joined by a line.

    Where nodes have several ranks, draw what passes the busiest link: measured, and by the plan.
    """
    looks = _LOOKS_OF_LINKS if block.ranks_per_node > 1 else _LOOKS_OF_RANKS
    sent = {row: _megabytes(row) for row in block.measured if row.nodes > 1}
    _check_that_bytes_differ(sent)
    scale = _scale([value for values in sent.values() for value in values])

    def draw(axis: Axes, y: float, row: CellRow) -> None:
        shown = [max(value, scale.floor) for value in sent[row]]
        if not shown:
            _write_reason(axis, y, "bytes not counted")
            return
        axis.plot(shown, [y] * len(shown), color=color(row.sync), linewidth=2, alpha=0.6)
        for value, look in zip(shown, looks.values(), strict=False):
            axis.plot(value, y, color=color(row.sync), **look)

    panels = _Panels(block, narrow=narrow, baseline=False, extra=0.5 if narrow else 0.35)
    panels.fill(draw, xlabel=scale.label, limits=scale.limits)
    if scale.floor:
        for axis in panels.axes:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    heading = "Bytes sent in a step"
    if looks is _LOOKS_OF_LINKS:
        heading = "Bytes that the busiest link carries in one direction in a step"
    title(panels.figure, heading, emulated=block.emulated)
    panels.figure.legend(
        handles=[line_key(label, linestyle="", **look) for label, look in looks.items()],
        loc="outside lower center",
        ncols=2,
        handlelength=1,
    )
    return panels.figure


def bytes_caption(block: ComparisonGroup) -> str:
    """Return what the figure of bytes shows: those of ranks or, if nodes have several, of links."""
    if block.ranks_per_node > 1:
        return (
            "Bytes of a step that pass the link of the node with most of them, in the direction "
            "with more; messages between ranks of one node stay inside. The square is what the "
            "kernel counted, with the headers of TCP, IP and Ethernet; the circle is the "
            "strategy's plan, without them."
        )
    return (
        "Bytes of gradients that each strategy sends in a step, without TCP/IP headers (strategies "
        "that send only every few steps: the mean). The square is rank 0, the circle the mean of "
        "the other ranks; a square inside its circle: rank 0 sends as much as the others."
    )


class _Scale(NamedTuple):
    """The axis of MB; ``floor`` : what a logarithmic one shows in place of 0, else 0."""

    label: str
    limits: tuple[float, float]
    floor: float = 0.0


def _scale(values: Sequence[float]) -> _Scale:
    """Return an axis for these values: logarithmic if they differ more than 15 times."""
    positive = [value for value in values if value > 0]
    most = max(positive)
    least = min(positive)
    if most / least <= 15:
        return _Scale("MB sent a step", (-0.04 * most, most * 1.1))
    floor = least / 2
    return _Scale("MB sent a step (log scale)", (floor * 0.8, most * 1.7), floor)


def _megabytes(row: CellRow) -> list[float]:
    """Return the MB a step of rank 0 and of each of the others, as far as they were counted.

    Where nodes have several ranks: those on the busiest link, measured and by the plan.
    """
    counted = (row.medians.root_bytes_sent, row.medians.others_bytes_sent)
    if row.cell.ranks_per_node > 1:
        counted = (row.busiest_link_bytes, row.planned_busiest_link_bytes)
    return [value / 1e6 for value in counted if value is not None]


def _check_that_bytes_differ(sent: Mapping[CellRow, Sequence[float]]) -> None:
    """Raise NothingToShowError if nothing was counted, or all is equal on each number of nodes."""
    panels = grouped((row.nodes, value) for row, values in sent.items() for value in values)
    if not panels:
        raise NothingToShowError("No cell on more than one rank has counted its bytes yet.")
    place = next(iter(sent)).place
    who = "rank"
    if next(iter(sent)).cell.ranks_per_node > 1:
        who = "link"
    texts = []
    for nodes, values in panels.items():
        if max(values) - min(values) > _EQUAL * max(values):
            return
        texts.append(f"{fmean(values):,.1f} MB a step on {count(nodes, place)}")
    raise NothingToShowError(
        f"No figure, because every {who} of every strategy sends the same: {'; '.join(texts)}."
    )


class _Panels:
    """A figure with a panel per number of nodes and a row per strategy, and its ``axes``.

    A strategy with a wrong result has a cross before its name. baseline : whether the cell of one
    rank stands first in every panel. extra : inches for the legend.

    ``singles`` holds that cell, or nothing; ``labels`` the names of a panel's rows, from
    top to bottom; ``columns`` how many panels stand side by side.
    """

    def __init__(
        self, block: ComparisonGroup, *, narrow: bool, baseline: bool, extra: float
    ) -> None:
        self.block = block
        self.singles: list[CellRow] = []
        if baseline and block.nodes != [1]:
            self.singles = [row for row in block.rows if row.nodes == 1]
        wrong = {row.sync for row in block.rows if row.claim.wrong}
        self.labels = [f"{row.sync} (1 {block.alone})" for row in self.singles]
        self.labels += [f"✗ {sync}" if sync in wrong else sync for sync in block.syncs]
        self.columns = 3
        if narrow:
            self.columns = 1
        elif len(block.nodes) in (2, 4):
            self.columns = 2
        self.figure, self.axes = grid(
            len(block.nodes),
            narrow=narrow,
            columns=self.columns,
            height=max(3, len(self.labels)) * _ROW + 0.75,  # room for the legend
            extra=extra,
        )

    def fill(
        self,
        draw: Callable[[Axes, float, CellRow], None],
        *,
        xlabel: str,
        limits: tuple[float, float],
    ) -> None:
        """Draw each cell in its row; one without numbers says why.

        draw : gets the axes, y and the cell. limits : of x.
        """
        for index, (axis, nodes) in enumerate(zip(self.axes, self.block.nodes, strict=True)):
            cells = [self.block.find(sync, nodes) for sync in self.block.syncs]
            for y, row in enumerate([*self.singles, *cells]):
                if row is None:
                    _write_reason(axis, y, "not run")
                elif not row.step:
                    _write_reason(axis, y, row.cell.status)
                else:
                    draw(axis, y, row)
            axis.set(title=self.block.size_text(nodes), xlabel=xlabel, xlim=limits)
            axis.set_ylim(len(self.labels) - 0.4, -0.6)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.set_yticks(range(len(self.labels)), self.labels)
            axis.tick_params(axis="y", length=0, labelleft=index % self.columns == 0)
            if self.singles:
                axis.axhline(0.5, color=INK, linewidth=0.6, alpha=0.35)
            axis.grid(axis="x")


def _write_reason(axis: Axes, y: float, text: str) -> None:
    """Write into a row why it has no value."""
    _write(axis, y, text, x=0.02, style="italic")


def _write(axis: Axes, y: float, text: str, *, x: float = 1.02, **look: Any) -> None:
    """Write into a row, by default right of the panel."""
    axis.annotate(
        text,
        (x, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        annotation_clip=False,
        **look,
    )
