"""Colours, sizes and file formats of all figures; a strategy has the same colour everywhere.

Figures draw lines and text in ``INK`` on ``PAPER``. Files keep these two colours. ``inline``
replaces them by the page's own colours, so that figures in the HTML follow light and dark mode.
"""

import io
import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
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

INK, PAPER = "#1b1f23", "#fffffe"
WIDE, NARROW = 9.0, 4.5  # inches: a page's column, and a phone

# Each has a contrast of about 3 to a light and to a dark page; no figure relies on colour alone.
COLORS = {
    "none": "#808285",
    "gather_scatter": "#c4560a",
    "gather_scatter_flat": "#df8b1f",
    "reduce_broadcast": "#9c7a1e",
    "all_reduce": "#1f6fb8",
    "all_reduce_flat": "#4aa3df",
    "tree": "#2c8c4a",
    "ring": "#11998a",
    "halving_doubling": "#7d9b2c",
    "overlapped": "#b0529c",
    "ddp": "#8467c9",
    "ddp_fp16": "#e0568c",
    "ddp_powersgd": "#c4374a",
    "topk": "#6a7fd6",
    "local_sgd": "#a8714f",
}
MARKERS = dict(zip(COLORS, "os^vDdPXhp*<>8H", strict=True))
DASHES = [(0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 3))]

# Neighbours also differ in lightness, and waiting is hatched, so that a grey print is readable.
SECTIONS = {
    "data": "#8d9299",
    "forward": "#6db0e3",
    "backward": "#1f64a8",
    "wait": "#eda244",
    "wire": "#c2410c",
    "sync": "#c2410c",
    "update": "#3f9e6e",
}
SECTION_LABELS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "wait": "sync: waiting for slower ranks",
    "wire": "sync: wire",
    "sync": "sync (not split)",
    "update": "update",
}

_RC: dict[Any, Any] = {  # Any: matplotlib types the keys as the settings of its own version
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "figure.titlesize": 11,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same figure gives the same ids
    "figure.dpi": 100,
}


class NothingToShowError(Exception):
    """The results hold nothing that this figure could show; the message says what is missing."""


def color(sync: str) -> str:
    """Return the colour of a strategy; the name of an unknown one picks a colour."""
    return COLORS.get(sync) or list(COLORS.values())[1 + sum(map(ord, sync)) % (len(COLORS) - 1)]


def marker(sync: str) -> str:
    """Return the marker of a strategy."""
    return MARKERS.get(sync, "o")


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
    rows = -(-count // columns)
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


def section_patch(name: str) -> Patch:
    """Return the legend entry of a section."""
    return Patch(
        facecolor=SECTIONS[name],
        edgecolor=PAPER,
        hatch="////" if name == "wait" else None,
        label=SECTION_LABELS[name],
    )


def title(figure: Figure, text: str, *, emulated: bool) -> None:
    """Put the title over the figure, at the left, with a mark if the measurement is emulated."""
    figure.suptitle(
        textwrap.fill(
            text + (" · EMULATED" if emulated else ""),
            46 if figure.get_figwidth() < WIDE else 98,  # letters that fit on a line
        ),
        x=0.005,
        ha="left",
        fontweight="bold",
    )


def style() -> AbstractContextManager[None]:
    """Return the context in which every figure is drawn and saved."""
    return plt.rc_context(_RC)


def save(figure: Figure, path: Path) -> str:
    """Write ``path``.png and ``path``.svg, and return the SVG for an HTML page."""
    figure.savefig(path.with_name(path.name + ".png"), dpi=150)
    figure.set_layout_engine("none")  # savefig has laid it out: keep that layout
    text = svg(figure)
    path.with_name(path.name + ".svg").write_text(text, encoding="utf-8")
    return inline(text, path.name)


def svg(figure: Figure) -> str:
    """Return the figure as SVG, without metadata, and close it."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    plt.close(figure)
    return buffer.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def inline(text: str, name: str) -> str:
    """Return an SVG file as a part of a page: unique ids, the page's colours, any width.

    Screen readers skip the SVG: the element around it carries the description.
    """
    body = re.sub(
        r'\A.*?<svg[^>]*?(viewBox="[^"]+")[^>]*>',
        r'<svg \1 aria-hidden="true" focusable="false">',
        text,
        flags=re.DOTALL,
    )
    body = re.sub(r'\sid="([^"]+)"', rf' id="{name}-\1"', body)
    body = re.sub(r'(?:xlink:)?(href="#|url\(#)', rf"\g<1>{name}-", body)
    return body.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
