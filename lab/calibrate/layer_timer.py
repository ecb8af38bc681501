"""Time every layer of a model, forward and backward, with hooks."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from common.profiling.step_timer import Moment, now, seconds_between


@dataclass
class Call:
    """One execution of a layer in a step, with the parameters whose gradients it completes."""

    name: str
    parameters: tuple[str, ...]
    ended: Moment
    backward_began: Moment | None = None


class LayerTimer:
    """Context manager that times every layer without children, and the loss, step after step.

    Call ``take`` after each step. A layer that runs several times in a step has a call for each;
    its parameters belong to the first call, whose backward comes last.

    ``_names`` holds the names of the trained parameters by id, ``_calls`` the step's calls so far.
    ``_last_gradient`` is when the latest gradient was ready, which ends backward.
    """

    def __init__(
        self, model: nn.Module, criterion: nn.Module, *, device: torch.device | str
    ) -> None:
        self._model = model
        self._criterion = criterion
        self._device = torch.device(device)
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._calls: list[Call] = []
        self._began: Moment = None
        self._last_gradient: Moment = None

    def __enter__(self) -> "LayerTimer":
        self._hooks = [self._model.register_forward_pre_hook(self._begin_step)]
        for name, layer in [*self._model.named_modules(), ("loss", self._criterion)]:
            if not list(layer.children()):
                self._hooks.append(layer.register_forward_hook(partial(self._end_layer, name)))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._gradient_ready))
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> tuple[tuple[Call, ...], list[float], list[float]]:
        """Return the last step's calls in order, their forward and their backward seconds."""
        ends = [self._began, *(call.ended for call in self._calls)]
        forward = [seconds_between(begin, end) for begin, end in pairwise(ends)]
        backward = []
        end = self._last_gradient
        for call in self._calls:  # the first layer's backward comes last
            begin = call.backward_began
            if begin is None:  # no gradient passes it: its backward takes no time
                begin = end
            backward.append(seconds_between(begin, end))
            end = begin
        return tuple(self._calls), forward, backward

    def _begin_step(self, *_: Any) -> None:
        self._calls = []
        self._began = now(self._device)

    def _end_layer(self, name: str, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Record the end of a layer's forward, and let its backward record when it begins."""
        claimed = {parameter for call in self._calls for parameter in call.parameters}
        own = [self._names[id(p)] for p in layer.parameters(recurse=False) if id(p) in self._names]
        call = Call(name, tuple(p for p in own if p not in claimed), now(self._device))
        self._calls.append(call)
        if output.requires_grad:
            output.register_hook(lambda _: setattr(call, "backward_began", now(self._device)))

    def _gradient_ready(self, _gradient: Tensor) -> None:
        self._last_gradient = now(self._device)
