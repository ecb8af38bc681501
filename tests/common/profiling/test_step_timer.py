"""Whole steps and sections, also on the clock of a stand-in for a GPU, which drifts."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from common.profiling import step_timer
from common.profiling.step_timer import StepTimer
from tests.helpers.engines import prepared

PAUSE = 0.02
DRIFT = 20e-6  # a GPU's clock and a host's differ by some parts in a million


class Clocks:
    """The host's clock, and events of a GPU whose clock runs a little faster."""

    def __init__(self):
        self.host_seconds = 1000.0
        clocks = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == "stream of cuda:1"
                self.seconds = clocks.host_seconds * (1 + DRIFT)

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return float(np.float32((end.seconds - self.seconds) * 1000))

        self.event = Event


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(torch.cuda, "Event", clocks.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: clocks.host_seconds)
    return clocks


def test_times_stay_exact_for_hours(clocks):
    """Float32 milliseconds since the start would be 2 ms apart after five hours."""
    timer = StepTimer(torch.device("cuda", 1))
    for _ in range(5 * 360):  # a flush each 10 s
        clocks.host_seconds += 10.0
        timer.anchor()
    clocks.host_seconds += 7.0  # before the epoch
    timer.begin()
    clocks.host_seconds += 0.25
    began = clocks.host_seconds
    with timer.section("sync"):
        clocks.host_seconds += 0.001
    taken = timer.take()
    [(begin, end)] = timer.spans(taken)["sync"]
    assert begin == pytest.approx(began, abs=2e-5)
    assert end - begin == pytest.approx(0.001, abs=1e-6)
    assert timer.seconds(taken)["step"] == pytest.approx(0.251, abs=2e-5)


def test_a_step_lasts_until_the_next_begins():
    """A callback after each step takes time: the next step and the epoch's mean contain it."""
    engine, records = prepared(nn.Linear(10, 3)), []
    time.sleep(10 * PAUSE)  # before the epoch: in no step
    began = time.perf_counter()
    result = engine.train_epoch(
        [(torch.randn(2, 10), torch.tensor([0, 1]))] * 3,
        epoch=1,
        on_steps=records.extend,
        after_step=lambda step: time.sleep(PAUSE),
    )
    wall = time.perf_counter() - began
    outside = [record.step_seconds - sum(record.seconds.values()) for record in records]
    assert outside[0] >= 0
    assert min(outside[1:]) >= PAUSE
    assert sum(record.step_seconds for record in records) <= wall, "no time is counted twice"
    assert result.mean_step_seconds >= PAUSE, "without the first step"
