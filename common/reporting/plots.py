"""The pictures of one run: its loss over the steps, and its confusion matrix.

Figures draw lines and text in ``INK`` on ``PAPER`` and one set of data in ``ACCENT``; ``RC`` sets
the text sizes. lab/plot_style.py uses the same. Both functions raise UserError if the file cannot
be written.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure  # without pyplot, which would look for a screen
from matplotlib.ticker import MaxNLocator

from common.utils.atomic_files import write_atomically

INK = "#1b1f23"
PAPER = "#fffffe"
ACCENT = "#0b5cad"

RC: dict[Any, Any] = {  # Any: matplotlib types the keys as the settings of its own version
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
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same figure gives the same ids
    "figure.dpi": 100,
}

_DPI = 240  # a loss curve of 2016 and a matrix of ten classes of 1600 pixels across
_SHARES = LinearSegmentedColormap.from_list("shares", [PAPER, "#9cc3e6", ACCENT, "#06315c"])


def draw_loss(path: Path, *, steps: Sequence[int], losses: Sequence[float], title: str) -> None:
    """Draw the training loss of each step (faint) and its mean over the steps around it."""
    window = max(1, min(len(losses) // 10, 50))
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.4, 4.8), layout="constrained")
        axes = figure.subplots()
        [line] = axes.plot(
            steps,
            losses,
            color=ACCENT,
            linewidth=1,
            label="each step (global batch)",
        )
        if len(steps) == 1:
            line.set_marker("o")  # a line of one point is invisible
        if window > 1:
            line.set_alpha(0.35)
            smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
            axes.plot(
                steps[window // 2 :][: len(smooth)],
                smooth,
                color=ACCENT,
                linewidth=2,
                label=f"mean over {window} neighbouring steps",
            )
        axes.set(xlabel="step", ylabel="training loss")
        axes.set_title(title, loc="left", fontweight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid()
        axes.legend()
        _save(figure, path, dpi=_DPI)


def draw_confusion_matrix(
    path: Path, *, matrix: Sequence[Sequence[int]], class_names: Sequence[str], title: str
) -> None:
    """Draw which share of each true class (row) was predicted as each class (column).

    With up to 20 classes, the cells show the numbers; a zero is left empty.
    """
    counts = np.asarray(matrix, dtype=int)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    count = len(class_names)
    few = count <= 20
    if few:
        side = max(5.0, 0.55 * count)
        size = 9  # of all texts
        style: dict[str, Any] = {}
        if max(map(len, class_names)) > 3:
            style = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    else:
        side = min(20.0, 0.16 * count + 2)
        size = 18  # of all texts but the classes' names
        style = {"rotation": 90}
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(side + 1.2, side), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares, cmap=_SHARES, vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
        names_size = size if few else 6
        axes.set_xticks(range(count), class_names, fontsize=names_size, **style)
        axes.set_yticks(range(count), class_names, fontsize=names_size)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_label_text("predicted class", fontsize=size)
        axes.yaxis.set_label_text("true class", fontsize=size)
        axes.set_title(title, loc="left", fontweight="bold", fontsize=size)
        if few:
            _write_numbers(axes, counts, shares)
        _save(figure, path, dpi=_DPI if few else 150)


def _write_numbers(axes: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
    """Write each number but zero into its cell, in the colour that is seen there."""
    for row, column in np.argwhere(counts):
        axes.text(
            column,
            row,
            f"{counts[row, column]}",
            ha="center",
            va="center",
            fontsize=8,
            color=PAPER if shares[row, column] > 0.4 else INK,
        )


def _save(figure: Figure, path: Path, *, dpi: int) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    write_atomically(path, content.getbuffer())
