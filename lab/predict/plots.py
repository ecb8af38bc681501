"""The figure of ``lab predict --figure``: step time and efficiency over the number of nodes.

``numbers_to_draw`` returns the numbers of nodes to predict, ``draw_scaling`` draws the predictions.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from common.errors import UserError, file_errors
from common.utils.atomic_files import regular_target
from lab.plot_style import color, grid, label_beside, marker, plt, style
from lab.predict.tables import PredictedStep

_ONE_LINE = 0.03  # lines that differ by no more than this share are drawn as one
_LETTER = 0.045  # of an axis' height, between two labels beside it
_TICKS = 9  # numbers of nodes that fit below the axis
_SUFFIXES = (".png", ".svg", ".pdf")


def numbers_to_draw(limit: int) -> list[int]:
    """Return the powers of two, where halving_doubling is fastest, and ``limit`` itself."""
    return sorted({1 << power for power in range(limit.bit_length())} | {limit})


def draw_scaling(
    path: Path, rows: Sequence[PredictedStep], *, scaling: str, summary: Sequence[str]
) -> None:
    """Write the figure of the rows that have a prediction to ``path``, with ``summary`` below it.

    Raises UserError if the file's suffix names no known format, or if it cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(
            f"--figure: got {str(path)!r}; give a file that ends in {', '.join(_SUFFIXES)}"
        )
    step_curves: dict[str, dict[int, float]] = {}
    efficiency_curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.prediction is not None and row.efficiency is not None:
            step_curves.setdefault(row.sync, {})[row.nodes] = row.prediction.step_seconds
            efficiency_curves.setdefault(row.sync, {})[row.nodes] = row.efficiency
    with style():
        figure, (steps, efficiencies) = grid(
            2, narrow=False, columns=1, height=3.7, extra=0.8, sharex=True
        )
        _panel(steps, step_curves, "seconds a step")
        _panel(efficiencies, efficiency_curves, "efficiency")
        efficiencies.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:,g} %")
        )
        efficiencies.set_xlabel("nodes")
        figure.suptitle(
            f"{scaling.capitalize()} scaling, predicted", x=0.005, ha="left", fontweight="bold"
        )
        notes = "\n".join(line for each in summary for line in textwrap.wrap(each, 130))
        figure.supxlabel(notes, x=0.005, ha="left", fontsize=7)
        with file_errors(
            f"--figure: {path} cannot be written", ": give a file in a folder that exists"
        ):
            regular_target(path)
            figure.savefig(path, dpi=150)
        plt.close(figure)


def _panel(axis: Axes, curves: Mapping[str, Mapping[int, float]], label: str) -> None:
    """Draw each strategy's curve (number of nodes: value); curves that coincide become one."""
    counts = sorted({nodes for curve in curves.values() for nodes in curve})
    axis.set(xscale="log", yscale="log", ylabel=label, xlim=(0.8, 1.1 * max(2, counts[-1])))
    ends = []
    for names in _coinciding(curves):
        first = names[0]
        values = list(curves[first].values())
        axis.plot(
            list(curves[first]),
            values,
            color=color(first),
            marker=marker(first),
            markersize=3.5,
            linewidth=1.4,
        )
        ends.append((", ".join(names), counts[-1], values[-1], color(first)))
    axis.xaxis.set(
        major_locator=FixedLocator(counts[:: -(-len(counts) // _TICKS)]),
        minor_locator=NullLocator(),
        major_formatter=FuncFormatter(lambda nodes, _: f"{nodes:,.0f}"),
    )
    axis.yaxis.set(
        major_locator=LogLocator(subs=(1, 2, 5)),
        minor_locator=NullLocator(),
        major_formatter=FuncFormatter(lambda number, _: f"{number:,g}"),
    )
    axis.grid(axis="y")
    label_beside(axis, ends, gap=_LETTER)


def _coinciding(curves: Mapping[str, Mapping[int, float]]) -> list[list[str]]:
    """Return the names in groups whose curves coincide."""

    def close(one: str, other: str) -> bool:
        pairs = zip(curves[one].values(), curves[other].values(), strict=True)
        return all(abs(own - reference) <= _ONE_LINE * reference for own, reference in pairs)

    groups: dict[str, list[str]] = {}
    for name in curves:
        first = next((first for first in groups if close(name, first)), name)
        groups.setdefault(first, []).append(name)
    return list(groups.values())
