"""The figure of ``lab predict --figure``: step time and efficiency over nodes, and over the rate.

``numbers_to_draw`` returns the numbers of nodes to predict, ``draw_scaling`` draws the predictions.
"""

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from common.errors import UserError, file_errors
from common.utils.atomic_files import write_atomically
from common.utils.grouping import first_fit, grouped
from lab.plot_style import grid, label_beside, plt, style
from lab.predict.tables import PredictedStep, main_step
from lab.strategy_style import color, marker

_ONE_LINE = 0.03  # lines that differ by no more than this share are drawn as one
_MOST_BANDS = 4  # of intervals in one panel
_LETTER = 0.045  # of an axis' height, between two labels beside it
_TICKS = 9  # numbers of nodes that fit below the axis
_SUFFIXES = (".png", ".svg", ".pdf")
# Bits per second.
RATES_TO_DRAW = (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10, 5e10, 1e11)


def numbers_to_draw(limit: int) -> list[int]:
    """Return the powers of two, where halving_doubling is fastest, and ``limit`` itself."""
    return sorted({1 << power for power in range(limit.bit_length())} | {limit})


def draw_scaling(
    path: Path,
    rows: Sequence[PredictedStep],
    by_rate: Mapping[float, Sequence[PredictedStep]],
    *,
    asked: tuple[int, float | None],
    scaling: str,
    summary: Sequence[str],
) -> None:
    """Write the figure of the rows to ``path``, with ``summary`` below it.

    by_rate : rows for one number of nodes, by bits per second. asked : the nodes and the rate that
    the reader has, which the figure marks.

    Raises UserError if the file's suffix names no known format, or if it cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(
            f"--figure: got {str(path)!r}; give a file that ends in {', '.join(_SUFFIXES)}"
        )
    at_nodes = [(row.nodes, row) for row in rows]
    at_rates = [(rate / 1e9, row) for rate, rows_at in by_rate.items() for row in rows_at]
    main = main_step(rows)
    named = None if main is None else main.sync
    nodes, rate_bits = asked
    gbits = None if rate_bits is None else rate_bits / 1e9
    with style():
        figure, (steps, efficiencies, rates) = grid(
            3, narrow=False, columns=1, height=3.7, extra=0.8
        )
        _panel(steps, _curves(at_nodes, _step), "seconds a step", asked=nodes, main=named)
        efficiency = _curves(at_nodes, _efficiency)
        _panel(efficiencies, efficiency, "efficiency", asked=nodes, main=named)
        _panel(rates, _curves(at_rates, _step), "seconds a step", asked=gbits, main=named)
        steps.set_xlabel("nodes")
        rates.set_xlabel(f"Gbit/s of each link, {nodes:,} nodes")
        efficiencies.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:,g} %")
        )
        efficiencies.set_xlabel("nodes")
        figure.suptitle(
            f"{scaling.capitalize()} scaling, predicted", x=0.005, ha="left", fontweight="bold"
        )
        if named is not None:
            summary = [*summary, f"bands: 80 % intervals; of many strategies only that of {named}"]
        notes = [textwrap.fill(line, 130) for line in summary]
        figure.supxlabel("\n".join(notes), x=0.005, ha="left", fontsize=7)
        with file_errors(
            f"--figure: {path} cannot be written", ": give a file in a folder that exists"
        ):
            path.resolve().parent.stat()  # else writing would make the folder
            picture = io.BytesIO()
            figure.savefig(picture, format=path.suffix[1:], dpi=150)
            write_atomically(path, picture.getbuffer())
        plt.close(figure)


@dataclass(frozen=True)
class _Point:
    """A value on a curve, with the ends of its 80 % interval."""

    value: float
    low: float
    high: float


def _step(row: PredictedStep) -> _Point:
    return _Point(row.prediction.step_seconds, row.low_seconds, row.high_seconds)


def _efficiency(row: PredictedStep) -> _Point:
    low, high = row.speedup_range
    return _Point(row.efficiency, low / row.nodes, high / row.nodes)


_Curves = dict[str, dict[float, _Point]]


def _curves(
    rows: Sequence[tuple[float, PredictedStep]], of: Callable[[PredictedStep], _Point]
) -> _Curves:
    """Return a point of each row, by strategy and by number."""
    by_sync = grouped((row.sync, (number, of(row))) for number, row in rows)
    return {sync: dict(points) for sync, points in by_sync.items()}


def _panel(
    axis: Axes, curves: _Curves, label: str, *, asked: float | None, main: str | None
) -> None:
    """Draw each strategy's curve (nodes or Gbit/s: value); curves that coincide become one.

    Up to ``_MOST_BANDS`` curves have a band for the interval; of more only that of ``main``, since
    the bands would hide each other.
    """
    counts = sorted({nodes for curve in curves.values() for nodes in curve})
    limits = (0.8 * counts[0], 1.1 * max(2, counts[-1]))
    axis.set(xscale="log", yscale="log", ylabel=label, xlim=limits)
    if asked is not None:
        axis.axvline(asked, color="0.5", linewidth=1, linestyle=":")
        axis.text(asked, 0.98, " you", transform=axis.get_xaxis_transform(), va="top", fontsize=7)
    ends = []
    lines = _coinciding(curves)
    for names in lines:
        first = names[0]
        numbers = list(curves[first])
        points = list(curves[first].values())
        values = [point.value for point in points]
        if len(lines) <= _MOST_BANDS or main in names:
            axis.fill_between(
                numbers,
                [point.low for point in points],
                [point.high for point in points],
                color=color(first),
                alpha=0.2,
                linewidth=0,
            )
        axis.plot(
            numbers,
            values,
            color=color(first),
            marker=marker(first),
            markersize=3.5,
            linewidth=2.2 if main in names else 1.4,
        )
        ends.append((", ".join(names), counts[-1], values[-1], color(first)))
    every = math.ceil(len(counts) / _TICKS)  # how many counts stand from one tick to the next
    axis.xaxis.set(
        major_locator=FixedLocator(counts[::every]),
        minor_locator=NullLocator(),
        major_formatter=FuncFormatter(lambda nodes, _: f"{nodes:,g}"),
    )
    axis.yaxis.set(
        major_locator=LogLocator(subs=(1, 2, 5)),
        minor_locator=NullLocator(),
        major_formatter=FuncFormatter(lambda number, _: f"{number:,g}"),
    )
    axis.grid(axis="y")
    label_beside(axis, ends, gap=_LETTER)


def _coinciding(curves: _Curves) -> list[list[str]]:
    """Return the names in groups whose curves coincide with the group's first."""

    def coincides(group: list[str], name: str) -> bool:
        pairs = zip(curves[name].values(), curves[group[0]].values(), strict=True)
        return all(abs(own.value - at.value) <= _ONE_LINE * at.value for own, at in pairs)

    return first_fit(curves, coincides)
