"""docs/examples/gpt.py: the losses of one process on any number of ranks, also after a resume."""

import random
import runpy
import sys

import pytest

from tests.helpers import ROOT

SCRIPT = ROOT / "docs/examples/gpt.py"
WORDS = "the ranks send their gradients to all others before each step of training".split()
CURVES = ("train_loss", "val_loss", "ema_val_loss", "val_top5", "ema_val_top5", "learning_rate")


def run(monkeypatch, folder, ranks, epochs, *more):
    command = ["gpt.py", "--size", "tiny", "--fp32", "--text", folder, "--output-dir", folder]
    command += ["--ranks", ranks, "--epochs", epochs, *more]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    history = runpy.run_path(str(SCRIPT))["main"]()
    return {name: history[name] for name in CURVES}


@pytest.mark.slow
def test_the_losses_are_equal_on_one_two_and_three_ranks_and_after_a_resume(tmp_path, monkeypatch):
    draw = random.Random(0)
    text = " ".join(draw.choices(WORDS, k=5000))
    (tmp_path / "text.md").write_text(text)
    alone = run(monkeypatch, tmp_path, 1, 2)
    assert alone["train_loss"][1] < 0.9 * alone["train_loss"][0]
    begun = run(monkeypatch, tmp_path, 2, 1)
    resumed = run(monkeypatch, tmp_path, 3, 2, "--resume", tmp_path / "gpt/last.pt")
    for name in CURVES:
        assert begun[name] + resumed[name] == pytest.approx(alone[name], rel=1e-4), name
