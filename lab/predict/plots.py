"""The figure of ``lab predict --figure``: each strategy's step time and efficiency over the number of nodes, both logarithmic.

``numbers_to_draw`` lists the numbers of nodes to predict, ``draw_scaling`` draws the predictions.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from common.errors import UserError
from lab.plot_style import color, grid, marker, plt, style
from lab.predict.tables import PredictedStep

_ONE_LINE = 0.03  # lines that differ by no more than this share are drawn as one
_LETTER = 0.045  # of an axis' height, between two labels beside it
_SUFFIXES = (".png", ".svg", ".pdf")

Point = tuple[int, float]
"""Number of nodes, value there."""


def numbers_to_draw(limit: int) -> list[int]:
    """Return 1, 2, 4, ... and ``limit``: powers of two, which is where halving and doubling is at its best."""
    return sorted({1 << power for power in range(limit.bit_length())} | {limit})


def draw_scaling(
    path: Path, rows: Sequence[PredictedStep], *, scaling: str, summary: Sequence[str]
) -> None:
    """Write the figure of ``rows``, which all have a prediction, to ``path``; ``summary`` says below it what the numbers are of.

    Raises UserError where the file's ending is of no format, or where it cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(
            f"--figure: got {str(path)!r}, give a file that ends in {', '.join(_SUFFIXES)}"
        )
    step_curves: dict[str, list[Point]] = {}
    efficiency_curves: dict[str, list[Point]] = {}
    for row in rows:
        assert row.prediction is not None, "only rows with a prediction are drawn"
        assert row.efficiency is not None, "a row with a prediction has an efficiency"
        step_curves.setdefault(row.sync, []).append((row.nodes, row.prediction.step_seconds))
        efficiency_curves.setdefault(row.sync, []).append((row.nodes, row.efficiency))
    with style():
        figure, (steps, efficiencies) = grid(
            2, narrow=False, columns=1, height=3.7, extra=0.8, sharex=True
        )
        _panel(steps, step_curves, "seconds a step")
        _panel(efficiencies, efficiency_curves, "efficiency")
        efficiencies.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        efficiencies.set_xlabel("nodes")
        figure.suptitle(
            f"{scaling.capitalize()} scaling, predicted", x=0.005, ha="left", fontweight="bold"
        )
        figure.supxlabel(
            "\n".join(line for each in summary for line in textwrap.wrap(each, 130)),
            x=0.005,
            ha="left",
            fontsize=7,
        )
        try:
            figure.savefig(path, dpi=100)
        except OSError as error:
            raise UserError(
                f"--figure: {path} cannot be written ({error.strerror}): give a file in a folder that is "
                "there"
            ) from error
        finally:
            plt.close(figure)


def _panel(axis: Axes, curves: dict[str, list[Point]], label: str) -> None:
    lines = {name: [value for _, value in points] for name, points in curves.items()}
    most = max(nodes for points in curves.values() for nodes, _ in points)
    axis.set(xscale="log", yscale="log", ylabel=label, xlim=(0.8, 1.1 * max(2, most)))
    ends = []
    for names in _as_one(lines):
        first = names[0]
        axis.plot(
            [nodes for nodes, _ in curves[first]],
            lines[first],
            color=color(first),
            marker=marker(first),
            markersize=3.5,
            linewidth=1.4,
        )
        ends.append((lines[first][-1], ", ".join(names), color(first)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda nodes, _: f"{nodes:,.0f}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(axis="y")
    _label(axis, ends)


def _as_one(lines: dict[str, list[float]]) -> list[list[str]]:
    """The names, those together whose lines lie on one another."""
    groups: list[list[str]] = []
    for name, line in lines.items():
        for group in groups:
            pairs = zip(line, lines[group[0]], strict=True)
            if all(abs(own - other) <= _ONE_LINE * other for own, other in pairs):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _label(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each name beside the end of its line, moved apart where they would cover one another."""
    to_share = axis.transScale + axis.transLimits
    wanted = sorted(
        (to_share.transform((axis.get_xlim()[1], value))[1], value, name, line_color)
        for value, name, line_color in ends
    )
    heights: list[float] = []
    for height, *_ in wanted:
        heights.append(max(height, heights[-1] + _LETTER) if heights else height)
    if heights[-1] > 1.02:  # labels pushed out above the axis move down again
        highest = 1.02
        for index in reversed(range(len(heights))):
            heights[index] = min(heights[index], highest)
            highest = heights[index] - _LETTER
    for height, (_, value, name, line_color) in zip(heights, wanted, strict=True):
        axis.annotate(
            name,
            xy=(1.0, to_share.transform((axis.get_xlim()[1], value))[1]),
            xycoords="axes fraction",
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=line_color,
            arrowprops={
                "arrowstyle": "-",
                "color": line_color,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
