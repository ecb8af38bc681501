"""The pictures of one run: its loss over the steps, and its confusion matrix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure  # without pyplot, which would look for a screen


def draw_loss(path: Path, *, steps: Sequence[int], losses: Sequence[float], title: str) -> None:
    """Draw the training loss of each step (faint) and its mean over the steps around it."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    window = max(1, min(len(losses) // 10, 50))
    axes.plot(
        steps,
        losses,
        color="tab:blue",
        alpha=0.3 if window > 1 else 1.0,
        linewidth=1,
        label="each step (global batch)",
    )
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(
            steps[window // 2 :][: len(smooth)],
            smooth,
            color="tab:blue",
            linewidth=2,
            label=f"mean of {window} steps around",
        )
    axes.set(xlabel="step", ylabel="training loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_confusion_matrix(
    path: Path, *, matrix: Sequence[Sequence[int]], class_names: Sequence[str], title: str
) -> None:
    """Draw which share of each true class (row) was predicted as each class (column).

    With up to 20 classes, the cells show the numbers.
    """
    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    count = len(class_names)
    few = count <= 20
    side = max(5.0, 0.55 * count) if few else min(20.0, 0.16 * count + 2)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
    size = 10 if few else 5
    slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    style: dict[str, Any] = slanted if few else {"rotation": 90}
    axes.set_xticks(range(count), class_names, fontsize=size, **style)
    axes.set_yticks(range(count), class_names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    if few:
        for (row, column), value in np.ndenumerate(counts.astype(int)):
            axes.text(
                column,
                row,
                value,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if shares[row, column] > 0.5 else "black",
            )
    figure.savefig(path, dpi=120)
