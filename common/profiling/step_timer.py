"""Time the sections of a training step: data, forward, backward, sync, update.

"sync" is exposed communication: the time from the moment this rank's last gradient is ready until
all gradients are final. For strategies that begin after backward, this is the whole exchange; for
DistributedDataParallel, it is the part that backward did not hide. A strategy that exchanges
weights after the optimiser's step adds a second part, and its waits for weights in forward count.
So do those of this project's SyncBatchNorm in forward and backward.

The whole step is timed as well, from the end of the step before: "step" contains what lies between
the sections, e.g. the metrics, the callbacks and Python's own time.
"""

import time
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.distributed.failures import Activity
from common.profiling.records import SECTIONS, Section

Moment = Any  # a ``time.perf_counter`` on the CPU, a recorded ``torch.cuda.Event`` on a GPU
STEP = "step"

RawSpans = dict[str, list[tuple[Moment, Moment]]]


def now(device: torch.device) -> Moment:
    """Return this moment on ``device``.

    On a GPU this queues an event behind all earlier work, without waiting for it.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))  # the current device may be another one
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds from ``begin`` to ``end``, two moments of one device.

    Waits until a GPU has reached ``end``.
    """
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class _Block:
    """The block of a section; a class, since a generator takes twice as long to enter."""

    __slots__ = ("_name", "_outer", "_timer")

    def __init__(self, timer: "StepTimer", name: Section) -> None:
        self._timer = timer
        self._name = name
        self._outer: Section | None = None

    def __enter__(self) -> None:
        self._outer = self._timer.current
        self._timer.switch_to(self._name)

    def __exit__(self, *error: object) -> None:
        self._timer.switch_to(self._outer)
        if self._name == "backward":
            self._timer.end_waits()


class StepTimer:
    """Times the sections of each step; on a GPU with CUDA events, so that timing does not wait.

    Call ``begin()`` before the first step, use ``with timer.section("forward"):`` around each
    part, then ``take()`` once a step. ``seconds(taken)`` and ``spans(taken)`` may be called later;
    they wait for the GPU. ``activity`` learns in which section this rank is.
    """

    def __init__(self, device: torch.device, activity: Activity | None = None) -> None:
        self._device = device
        self._activity = activity or Activity()
        self._hooks: list[RemovableHandle] = []
        self.current: Section | None = None
        self._section_began: Moment = 0.0
        self._origin: tuple[Moment, float] = (0.0, 0.0)  # one moment, on both clocks
        self.begin()

    def begin(self) -> None:
        """Begin the first step now, and forget the sections since the last ``take``."""
        self.anchor()
        self._start_step(now(self._device))

    def _start_step(self, moment: Moment) -> None:
        self._spans: RawSpans = defaultdict(list)
        self._last_gradient: Moment | None = None
        self._step_began = moment
        self._waits = 0  # parts of "sync" before the exchange: waits in forward and backward

    def anchor(self) -> None:
        """Compare the GPU's clock with the host's; ``spans`` and ``host_seconds`` use the result.

        Waits for the GPU, so call it where that has nothing left to do. To be called every few
        seconds: CUDA gives times as float32 milliseconds, which after an hour are 0.25 ms apart,
        and the two clocks do not run alike.
        """
        if self._device.type == "cuda":
            moment = now(self._device)
            moment.synchronize()
            self._origin = (moment, time.perf_counter())

    def watch_gradients(self, model: nn.Module) -> None:
        """Record when each parameter's gradient becomes ready.

        The last one of a step ends "backward".
        """
        self.close()
        self._hooks = [
            p.register_hook(self._gradient_ready) for p in model.parameters() if p.requires_grad
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def section(self, name: Section) -> AbstractContextManager[None]:
        """Time the block as the section of that name, one of ``SECTIONS``.

        A section may occur several times in a step. One inside another interrupts it, so that no
        moment counts twice.
        """
        return _Block(self, name)

    def end_waits(self) -> None:
        """Note how many parts of "sync" lie before the exchange: waits in forward and backward."""
        self._waits = len(self._spans.get("sync", ()))

    def switch_to(self, name: Section | None) -> None:
        """End the section that runs now, if any, and begin the one of that name, if any."""
        moment = now(self._device)
        if self.current is not None:
            self._spans[self.current].append((self._section_began, moment))
        self.current = name
        self._section_began = moment
        if name is not None:
            self._activity.enter(name)

    def take(self) -> RawSpans:
        """Return the step's raw times, for ``seconds`` and ``spans``, and begin the next step."""
        step_end = now(self._device)
        spans = self._spans
        syncs = spans.get("sync", [])
        if self._last_gradient is not None and len(syncs) > self._waits:
            backwards = spans["backward"]
            began, _ = backwards[-1]
            backwards[-1] = (began, self._last_gradient)
            _, ended = syncs[self._waits]  # the exchange, after the waits
            syncs[self._waits] = (self._last_gradient, ended)
        spans[STEP] = [(self._step_began, step_end)]
        self._start_step(step_end)
        return spans

    def seconds(self, taken: RawSpans) -> dict[str, float]:
        """Return the seconds of each section of a step that ``take`` returned, and of the "step".

        The whole step begins at the end of the step before.
        """
        totals = {}
        for name in (*SECTIONS, STEP):
            totals[name] = sum(seconds_between(begin, end) for begin, end in taken.get(name, ()))
        return totals

    def host_seconds(self, moment: Moment) -> float:
        """Return a moment's time by ``time.perf_counter``."""
        origin, seconds = self._origin
        return seconds + seconds_between(origin, moment)

    def spans(self, taken: RawSpans) -> dict[Section, list[tuple[float, float]]]:
        """Return when each part of each section began and ended, by ``time.perf_counter``."""
        times = {}
        for name in SECTIONS:
            parts = taken.get(name, ())
            times[name] = [
                (self.host_seconds(begin), self.host_seconds(end)) for begin, end in parts
            ]
        return times

    def _gradient_ready(self, _gradient: Tensor) -> None:
        self._last_gradient = now(self._device)
