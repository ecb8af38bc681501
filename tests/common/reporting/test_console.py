"""Progress off a terminal: which steps and images get a line, and that no long time is silent."""

import io
import sys

import pytest
import torch

from common.errors import UserError
from common.reporting import console as console_module
from common.reporting.console import Progress, say
from common.training_engine import StepRecord
from common.utils import progress as progress_module


class Clock:
    """Seconds that the test sets, in place of ``time``."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(progress_module, "time", fake)
    monkeypatch.setattr(console_module, "time", fake)
    return fake


def record(step):
    return StepRecord(epoch=1, step=step, loss=2.0, accuracy=0.5, local_loss=2.0)


def steps_shown(text):
    return [int(line.split("step ")[1].split("/")[0]) for line in text.splitlines()]


def progress(total, *, done=0):
    shown = Progress(total, done_steps=done, global_batch_size=8, visible=True, log_every=100)
    shown.begin()
    return shown


def test_slow_steps_are_shown_by_time_and_the_first_and_last_always(clock, capsys):
    """Steps of 4 s: the first one, then one every 10 s or more, then the last one."""
    shown = progress(9)
    for step in range(1, 10):
        clock.now += 4.0
        shown.show([record(step)])
    assert steps_shown(capsys.readouterr().out) == [1, 4, 7, 9]


def test_fast_steps_are_shown_by_number(clock, capsys):
    """Records arrive in groups; a resumed run shows its own first step."""
    shown = progress(420, done=150)
    for first in range(151, 421, 10):
        shown.show([record(step) for step in range(first, first + 10)])
    out = capsys.readouterr().out
    assert steps_shown(out) == [160, 200, 300, 400, 420]
    assert out.startswith("epoch 1  step 160/420  loss 2.000  accuracy 0.500  ")


@pytest.mark.parametrize("visible", [True, False])
def test_a_long_evaluation_counts_its_images(clock, capsys, visible):
    """Batches of 3 s: a line after every 10 s, with the time left; only rank 0 prints."""
    shown = Progress(1, done_steps=0, global_batch_size=8, visible=visible)

    def batches():
        for _ in range(8):
            clock.now += 3.0
            yield torch.zeros(250, 1), torch.zeros(250)

    counted = shown.counted(batches(), title="evaluation", images=2000)
    assert sum(len(labels) for _, labels in counted) == 2000
    lines = [
        "evaluation: 1,000 of 2,000 images, 12 s left",
        "evaluation: 2,000 of 2,000 images, 0 s left",
    ]
    assert capsys.readouterr().out.splitlines() == (lines if visible else [])


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_output_that_cannot_be_written_is_an_error_for_the_user(monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullDisk())  # the console looks it up for each line
    with pytest.raises(UserError, match=r"output could not be written \(No space left on device\)"):
        say("text")
    progress_module.console._buffer.clear()  # what was not written would come first next time
