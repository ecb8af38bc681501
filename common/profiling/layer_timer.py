"""Time every layer of a model, forward and backward, with hooks."""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Call:
    """One execution of a layer in a step: its name, the parameters whose gradients it makes, when it ended, when its backward
    began."""

    def __init__(self, name: str, parameters: tuple[str, ...], ended: Any) -> None:
        self.name, self.parameters, self.ended, self.backward_began = name, parameters, ended, None


class LayerTimer:
    """Takes the times of every layer without children, and of the loss, of one step after another; a context manager.

    ``take`` returns the last step's calls in the order of their execution, the seconds of forward of each and of backward.
    A layer that runs several times in a step has a call for each; its parameters belong to the first, whose backward comes last.
    """

    def __init__(self, model: nn.Module, criterion: nn.Module, *, device: str) -> None:
        self._model, self._criterion, self._on_gpu = model, criterion, device == "cuda"
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._calls: list[Call] = []
        self._began: Any = None
        self._last_gradient: Any = None
        self._hooks: list[Any] = []

    def __enter__(self) -> "LayerTimer":
        self._hooks = [self._model.register_forward_pre_hook(self._step_begins)]
        leaves = [
            (name, layer)
            for name, layer in self._model.named_modules()
            if not list(layer.children())
        ]
        for name, layer in [*leaves, ("loss", self._criterion)]:
            self._hooks.append(
                layer.register_forward_hook(
                    lambda layer, _, output, name=name: self._ended(name, layer, output)
                )
            )
        self._hooks += [
            p.register_hook(self._gradient_ready)
            for p in self._model.parameters()
            if p.requires_grad
        ]
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> tuple[tuple[Call, ...], list[float], list[float]]:
        """Return calls, seconds of forward, seconds of backward; see the class."""
        calls = tuple(self._calls)
        ends = [self._began, *(call.ended for call in calls)]
        forward = [self._between(begin, end) for begin, end in pairwise(ends)]
        backward, end = [], self._last_gradient
        for call in calls:  # the first layer's backward is the last
            taken = 0.0
            if call.backward_began is not None:
                taken, end = self._between(call.backward_began, end), call.backward_began
            backward.append(taken)
        return calls, forward, backward

    def _step_begins(self, *_: Any) -> None:
        self._calls, self._began = [], self._now()

    def _ended(self, name: str, layer: nn.Module, output: Tensor) -> None:
        taken = {parameter for call in self._calls for parameter in call.parameters}
        own = [self._names[id(p)] for p in layer.parameters(recurse=False) if id(p) in self._names]
        call = Call(
            name, tuple(parameter for parameter in own if parameter not in taken), self._now()
        )
        self._calls.append(call)
        if output.requires_grad:
            output.register_hook(lambda _: setattr(call, "backward_began", self._now()))

    def _gradient_ready(self, _gradient: Tensor) -> None:
        self._last_gradient = self._now()

    def _between(self, begin: Any, end: Any) -> float:
        if not self._on_gpu:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
