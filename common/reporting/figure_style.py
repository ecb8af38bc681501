"""Colours and text sizes of every figure, of one run and of a comparison (lab/plot_style.py).

Figures draw lines and text in ``INK`` on ``PAPER`` and one set of data in ``ACCENT``.
"""

from typing import Any

INK, PAPER, ACCENT = "#1b1f23", "#fffffe", "#0b5cad"

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
