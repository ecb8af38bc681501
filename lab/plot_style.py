"""Colours, sizes and files of all figures: one colour a strategy everywhere, drawn once for paper and for the screen.

Lines and text are drawn in ``INK`` on ``PAPER``: as they are in the files, replaced by the page's own colours in the HTML,
so that a figure follows light and dark.
"""

import io
import re
import textwrap
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, also where there is no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK, PAPER = "#1b1f23", "#fffffe"
WIDE, NARROW = 9.0, 4.5  # inches: a page's column, and a phone

# Each stands out from a light and from a dark page (contrast of 3 or so to both); labels never lean on colour alone.
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

# Neighbours differ in lightness, too, and waiting is hatched: a print in grey can be read.
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

_RC: dict[Any, Any] = {  # matplotlib's own type of a key names every setting of its version
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
    "figure.dpi": 100,
}


class NothingToShowError(Exception):
    """The results hold nothing that this figure could show; the message says what is missing."""


@dataclass(frozen=True)
class Drawing:
    """A figure in the page: its SVG for a wide and for a narrow screen, and what it says to who sees and who does not."""

    name: str
    title: str
    caption: str
    alt: str
    wide: str
    narrow: str


def color(sync: str) -> str:
    """The colour of a strategy; one that is new here gets one by its name."""
    return COLORS.get(sync) or list(COLORS.values())[1 + sum(map(ord, sync)) % (len(COLORS) - 1)]


def marker(sync: str) -> str:
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
    """Return a figure of ``count`` axes in at most ``columns`` columns, each ``height`` inches high."""
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


def section_patch(name: str) -> Patch:
    """The key of a section in a legend."""
    return Patch(
        facecolor=SECTIONS[name],
        edgecolor=PAPER,
        hatch="////" if name == "wait" else None,
        label=SECTION_LABELS[name],
    )


def title(figure: Figure, text: str, *, emulated: bool) -> None:
    """Put the title over the figure, at the left; an emulated measurement says so."""
    letters = 46 if figure.get_figwidth() < WIDE else 98  # that fit beside one another
    figure.suptitle(
        textwrap.fill(text + (" · EMULATED" if emulated else ""), letters),
        x=0.005,
        ha="left",
        fontweight="bold",
    )


def style() -> AbstractContextManager[None]:
    """The context in which every figure is drawn and saved."""
    return plt.rc_context(_RC)


def save(figure: Figure, path: Path) -> str:
    """Write ``path``.png and ``path``.svg and return the SVG as a part of an HTML page."""
    figure.savefig(path.with_name(path.name + ".png"), dpi=150)
    figure.set_layout_engine("none")  # it is laid out now, and stays so in the SVG
    text = _svg(figure)
    path.with_name(path.name + ".svg").write_text(text, encoding="utf-8")
    return inline(text, path.name)


def inline_only(figure: Figure, name: str) -> str:
    """Return the figure as a part of an HTML page, and write nothing."""
    return inline(_svg(figure), name)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    plt.close(figure)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.S)
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def inline(text: str, name: str) -> str:
    """Make an SVG file a part of a page: ids of its own, the page's colours, any width, nothing said by it to a reader."""
    body = text[text.index("<svg") :]
    body = re.sub(
        r"<svg[^>]*?(viewBox=\"[^\"]+\")[^>]*>",
        r'<svg \1 aria-hidden="true" focusable="false">',
        body,
        count=1,
    )
    body = re.sub(r'xlink:href="#', 'href="#', body)
    body = re.sub(r'\s(id)="([^"]+)"', rf' \1="{name}-\2"', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    return body.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
