"""How long the parts of a training step take: data, forward, backward, sync, update.

"sync" is exposed time: from the moment this rank's last gradient is ready until all gradients are final. So it is the
whole exchange for the strategies that begin after backward, and for DistributedDataParallel what backward did not hide. A
strategy that averages weights after the optimiser's step has a second part there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

SECTIONS = ("data", "forward", "backward", "sync", "update")

Moment = float | torch.cuda.Event
"""By ``time.perf_counter``, or on the GPU."""

RawSpans = dict[str, list[tuple[Moment, Moment]]]


class StepTimer:
    """Times the sections of one step after another; on a GPU with CUDA events, so that timing does not wait.

    Use ``with timer.section("forward"):`` around each part, then ``take()`` once a step; ``seconds(taken)`` and ``spans(taken)``
    may be asked later, and wait for the GPU then.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: RawSpans = {}
        self._last_gradient: Moment | None = None
        self._hooks: list[RemovableHandle] = []
        start = self._now()
        if isinstance(start, torch.cuda.Event):
            start.synchronize()
        self._origin = (start, time.perf_counter())

    def watch_gradients(self, model: nn.Module) -> None:
        """Note when each parameter's gradient becomes ready; the last one of a step ends "backward"."""
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
    def section(self, name: str) -> Iterator[None]:
        """Time what happens inside as the section of that name, one of ``SECTIONS``; a section may come several times."""
        begin = self._now()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((begin, self._now()))

    def take(self) -> RawSpans:
        """Return the step's raw times, for ``seconds``, and begin the next step."""
        spans = self._spans
        if self._last_gradient is not None and {"backward", "sync"} <= spans.keys():
            spans["backward"][-1] = (spans["backward"][-1][0], self._last_gradient)
            spans["sync"][0] = (self._last_gradient, spans["sync"][0][1])
        self._spans, self._last_gradient = {}, None
        return spans

    def seconds(self, taken: RawSpans) -> dict[str, float]:
        """Return the seconds of each section of a step that ``take`` returned."""
        return {
            name: sum(_seconds_between(begin, end) for begin, end in taken.get(name, ()))
            for name in SECTIONS
        }

    def spans(self, taken: RawSpans) -> dict[str, list[tuple[float, float]]]:
        """Return when each part of each section of a step began and ended, by ``time.perf_counter``."""
        return {
            name: [
                (self._on_clock(begin), self._on_clock(end)) for begin, end in taken.get(name, ())
            ]
            for name in SECTIONS
        }

    def _on_clock(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        event, seconds = self._origin
        return seconds + _seconds_between(event, moment)

    def _gradient_ready(self, _gradient: Tensor) -> None:
        self._last_gradient = self._now()

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)  # one timer has one clock
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000
