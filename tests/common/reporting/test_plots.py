"""The pictures of one run: large enough, whole steps on the axis, no zeros in the matrix."""

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from common.reporting.plots import draw_confusion_matrix, draw_loss


@pytest.fixture
def drawn(monkeypatch):
    """Return the list of the figures that are saved during the test."""
    figures = []
    savefig = Figure.savefig

    def save(figure, *args, **options):
        savefig(figure, *args, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def test_a_short_loss_curve_has_whole_steps(tmp_path, drawn):
    draw_loss(tmp_path / "loss.png", steps=[1, 2, 3], losses=[2.3, 2.2, 1.9], title="ring")
    axes = drawn[0].axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert [line.get_label() for line in axes.lines] == ["each step (global batch)"]
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[1] >= 1680


def test_a_long_loss_curve_has_the_mean_of_the_steps_around(tmp_path, drawn):
    losses = [float(step % 2) for step in range(100)]
    draw_loss(tmp_path / "loss.png", steps=list(range(100)), losses=losses, title="ring")
    _, mean = drawn[0].axes[0].lines
    assert list(mean.get_ydata()) == pytest.approx([0.5] * 91)
    assert mean.get_label() == "mean over 10 neighbouring steps"


def test_zeros_of_the_confusion_matrix_are_hidden(tmp_path, drawn):
    path = tmp_path / "matrix.png"
    matrix = [[90, 0, 10], [0, 7, 0], [1, 0, 0]]
    draw_confusion_matrix(path, matrix=matrix, class_names=["a", "b", "c"], title="accuracy")
    texts = {text.get_position(): text.get_text() for text in drawn[0].axes[0].texts}
    # (column, row)
    assert texts == {(0, 0): "90", (2, 0): "10", (1, 1): "7", (0, 2): "1"}
    assert matplotlib.image.imread(path).shape[1] >= 1200
    assert {label.get_rotation() for label in drawn[0].axes[0].get_xticklabels()} == {0}
