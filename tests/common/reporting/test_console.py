"""Progress: which steps and images get a line, and that no long time is silent."""

import errno
import io
import os
import re
import sys

import pytest
import torch
from rich.console import Console

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
    return StepRecord(epoch=1, step=step, loss=2.0 + step / 1000, accuracy=0.5, local_loss=2.0)


def steps_shown(text):
    return [int(line.split("step ")[1].split("/")[0]) for line in text.splitlines()]


def progress(total, *, done=0, log_every=100):
    shown = Progress(total, done_steps=done, global_batch_size=8, visible=True, log_every=log_every)
    shown.begin()
    return shown


def losses_shown(text):
    return steps_shown("\n".join(line for line in text.splitlines() if "loss" in line))


def test_the_loss_is_printed_after_the_steps_asked_for_and_others_show_life_alone(clock, capsys):
    """Steps of 4 s: the loss of 20 and 40, and the last; between them a line every 10 s or more."""
    shown = progress(45, log_every=20)
    for step in range(1, 46):
        clock.now += 4.0
        shown.show([record(step)])
    out = capsys.readouterr().out
    assert losses_shown(out) == [20, 40, 45]
    assert steps_shown(out) == [*range(3, 20, 3), *range(20, 40, 3), 40, 43, 45]
    assert out.startswith("epoch 1  step 3/45  2 samples/s  2 min 48 s left\n")


def test_fast_steps_are_shown_by_number(clock, capsys):
    """Records arrive in groups, which may end behind a step that gets a line."""
    shown = progress(420, done=150)
    for first in range(151, 421, 15):
        shown.show([record(step) for step in range(first, first + 15)])
    out = capsys.readouterr().out
    assert steps_shown(out) == losses_shown(out) == [200, 300, 400, 420]
    assert out.startswith("epoch 1  step 200/420  loss 2.200  accuracy 0.500  ")


def test_a_terminal_too_keeps_the_losses_asked_for(clock, monkeypatch):
    """The bar shows the latest loss alone; the lines stay above it."""
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=100, highlight=False)
    monkeypatch.setattr(progress_module, "console", terminal)
    monkeypatch.setattr(console_module, "console", terminal)
    shown = progress(40, log_every=20)
    with shown.bar:
        for step in range(1, 41):
            clock.now += 4.0
            shown.show([record(step)])
    lines = re.findall(r"step (\d+)/40  loss (\S+)", output.getvalue())
    assert lines == [("20", "2.020"), ("40", "2.040")]


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


class Unwritable(io.StringIO):
    """A file on a full disk, or a pipe whose reader left."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_output_that_cannot_be_written_is_an_error_for_the_user(number, monkeypatch):
    # the console looks it up for each line
    monkeypatch.setattr(sys, "stdout", Unwritable(number))
    reason = re.escape(os.strerror(number))
    with pytest.raises(UserError, match=rf"output could not be written \({reason}\)"):
        say("text")
    progress_module.console._buffer.clear()  # what was not written would come first next time
