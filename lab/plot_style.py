"""Colours, sizes and axes of all figures; strategy_style.py has the strategies' colours.

Figures draw lines and text in ``INK`` on ``PAPER`` (common/reporting/plots.py).
"""

import math
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only, also where there is no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.optimize import isotonic_regression

from common.reporting.plots import INK, PAPER, RC

WIDE, NARROW = 9.0, 4.5  # inches: a page's column, and a phone

DASHES = [(0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 3))]

# As strategies, sections have colours with a contrast of at least 3 to a light and to a dark page.
# Neighbours also differ in lightness, and waiting is hatched, so that a grey print is readable.
SECTIONS = {
    "data": "#66707c",
    "forward": "#4f97da",
    "backward": "#1b66b3",
    "wait": "#cf7f12",
    "wire": "#b83a0b",
    "own": "#c08448",
    "update": "#27986a",
}
SECTION_LABELS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "wait": "sync: waiting for slower ranks",
    "wire": "sync: exchange",
    "own": "sync: the strategy computes",
    "update": "update",
    "rest": "outside the sections",
}


class NothingToShowError(Exception):
    """A figure would show nothing, or the same everywhere; the message is a sentence to print."""


def grid(
    count: int,
    *,
    narrow: bool,
    columns: int,
    height: float,
    extra: float = 0.0,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its ``count`` axes in at most ``columns`` columns.

    Each row is ``height`` inches high; the figure is ``extra`` inches higher than its rows.
    """
    columns = max(1, min(columns, count))
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(NARROW if narrow else WIDE, rows * height + extra),
        layout="constrained",
        squeeze=False,
        sharex=sharex,
        sharey=sharey,
    )
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def line_key(label: str, **options: Any) -> Line2D:
    """Return the legend entry of a line or a marker."""
    return Line2D([], [], color=INK, label=label, **options)


def label_beside(axis: Axes, points: Sequence[tuple[str, float, float, str]], gap: float) -> None:
    """Write labels in a column right of the axis, ``gap`` of its height apart, with a line to each.

    points : text, x, y and colour of each. Call it once everything else is drawn.
    """
    axis.autoscale_view()  # else the limits are computed later
    to_axes = axis.transScale + axis.transLimits  # from data to 0..1
    # Each point after its height on the axis, 0 to 1.
    placed = sorted((float(to_axes.transform(point[1:3])[1]), *point) for point in points)
    heights = spread([place[0] for place in placed], min(gap, 1 / max(1, len(placed))))
    for (_, text, x, y, line_color), height in zip(placed, heights, strict=True):
        axis.annotate(
            text,
            (x, y),
            xytext=(1.05, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line_color,
                "linewidth": 0.7,
                "alpha": 0.7,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move sorted ``positions`` in 0..1 apart to a distance of ``gap``, as little as needed."""
    if not positions:
        return []
    steps = gap * np.arange(len(positions))
    # moved - steps must not fall: isotonic regression finds the nearest such positions
    moved = isotonic_regression(np.asarray(positions) - steps).x
    return list(np.clip(moved, 0, max(1 - steps[-1], 0)) + steps)


def section_style(name: str) -> dict[str, Any]:
    """Return how a section is filled; ``rest`` is the time of a step outside all sections."""
    if name == "rest":
        return {"facecolor": (INK, 0.16), "edgecolor": INK, "linewidth": 0.4}
    return {
        "facecolor": SECTIONS[name],
        "edgecolor": PAPER,
        "linewidth": 0.5,
        "hatch": "////" if name == "wait" else None,
    }


def section_patch(name: str) -> Patch:
    """Return the legend entry of a section."""
    return Patch(**section_style(name), label=SECTION_LABELS[name])


def title(figure: Figure, text: str, *, emulated: bool) -> None:
    """Put the title over the figure, at the left, with a mark if the measurement is emulated."""
    marked = text + ("\u00a0· EMULATED" if emulated else "")
    figure.suptitle(
        textwrap.fill(
            marked.replace(" %", "\u00a0%"),
            46 if figure.get_figwidth() < WIDE else 98,  # letters that fit on a line
        ),
        x=0.005,
        ha="left",
        fontweight="bold",
    )


def style() -> AbstractContextManager[None]:
    """Return the context in which every figure is drawn and saved."""
    return plt.rc_context(RC)
