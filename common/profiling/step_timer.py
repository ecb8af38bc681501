"""Time the sections of a training step: data, forward, backward, sync, update.

"sync" is exposed communication: the time from the moment this rank's last gradient is ready until
all gradients are final. For strategies that begin after backward, this is the whole exchange; for
DistributedDataParallel, it is the part that backward did not hide. A strategy that exchanges
weights after the optimiser's step adds a second part, and its waits for weights in forward count.

The whole step is timed as well, from the end of the step before: "step" contains what lies between
the sections, e.g. the metrics, the callbacks and Python's own time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.distributed.heartbeat import Activity
from common.profiling.device_clock import Moment, now, seconds_between

Section = Literal["data", "forward", "backward", "sync", "update"]
SECTIONS: tuple[Section, ...] = get_args(Section)

STEP = "step"

RawSpans = dict[str, list[tuple[Moment, Moment]]]


class StepTimer:
    """Times the sections of each step; on a GPU with CUDA events, so that timing does not wait.

    Call ``begin()`` before the first step, use ``with timer.section("forward"):`` around each
    part, then ``take()`` once a step. ``seconds(taken)``, ``step_seconds(taken)`` and
    ``spans(taken)`` may be called later; they wait for the GPU. ``activity`` learns in which
    section this rank is.
    """

    def __init__(self, device: torch.device, activity: Activity | None = None) -> None:
        self._device, self._activity = device, activity or Activity()
        self._spans: RawSpans = {}
        self._last_gradient: Moment | None = None
        self._hooks: list[RemovableHandle] = []
        self._timed = True
        self._running: tuple[Section, Moment] | None = None
        self._origin: tuple[Moment, float] = (0.0, 0.0)  # one moment, on both clocks
        self.begin()

    def begin(self) -> None:
        """Begin the first step now, and forget the sections since the last ``take``."""
        self.anchor()
        self._spans, self._last_gradient, self._step_began = {}, None, now(self._device)
        self._waits = 0

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

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Time the block as the section of that name, one of ``SECTIONS``.

        A section may occur several times in a step. One inside another interrupts it, so that no
        moment counts twice.
        """
        self._activity.enter(name)
        if not self._timed:
            yield
            return
        outer, moment = self._running, now(self._device)
        if outer is not None:
            self._add(outer, moment)
        self._running = (name, moment)
        try:
            yield
        finally:
            moment = now(self._device)
            self._add(self._running, moment)
            self._running = None
            if outer is not None:
                self._running = (outer[0], moment)
                self._activity.enter(outer[0])
            if name == "backward":
                self._waits = len(self._spans.get("sync", ()))

    def _add(self, running: tuple[Section, Moment], end: Moment) -> None:
        name, begin = running
        self._spans.setdefault(name, []).append((begin, end))

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Time no section in the block: a CUDA graph that is being recorded has no time."""
        self._timed = False
        try:
            yield
        finally:
            self._timed = True

    def take(self) -> RawSpans:
        """Return the step's raw times, for ``seconds`` and ``spans``, and begin the next step."""
        spans, step_end = self._spans, now(self._device)
        exchange = self._waits  # what "sync" had before was waiting for weights, in forward
        if self._last_gradient is not None and len(spans.get("sync", ())) > exchange:
            spans["backward"][-1] = (spans["backward"][-1][0], self._last_gradient)
            spans["sync"][exchange] = (self._last_gradient, spans["sync"][exchange][1])
        spans[STEP] = [(self._step_began, step_end)]
        self._spans, self._last_gradient, self._step_began, self._waits = {}, None, step_end, 0
        return spans

    def seconds(self, taken: RawSpans) -> dict[str, float]:
        """Return the seconds of each section of a step that ``take`` returned."""
        return {
            name: sum(seconds_between(begin, end) for begin, end in taken.get(name, ()))
            for name in SECTIONS
        }

    def step_seconds(self, taken: RawSpans) -> float:
        """Return the seconds of the whole step, from the end of the step before."""
        [(begin, end)] = taken[STEP]
        return seconds_between(begin, end)

    def host_seconds(self, moment: Moment) -> float:
        """Return a moment's time by ``time.perf_counter``."""
        origin, seconds = self._origin
        return seconds + seconds_between(origin, moment)

    def spans(self, taken: RawSpans) -> dict[str, list[tuple[float, float]]]:
        """Return when each part of each section began and ended, by ``time.perf_counter``."""
        return {
            name: [
                (self.host_seconds(begin), self.host_seconds(end))
                for begin, end in taken.get(name, ())
            ]
            for name in SECTIONS
        }

    def _gradient_ready(self, _gradient: Tensor) -> None:
        self._last_gradient = now(self._device)
