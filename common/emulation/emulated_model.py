"""Emulated compute: the layers of a model sleep as long as a profile says, and return gradients that nobody computed.

Eight ranks that compute on two cores measure the scheduler. Ranks that sleep leave the cores to what is to be seen: parameters,
hooks, buckets, the order and the moments in which gradients become ready, and all communication stay real.

Order of the calls: ``Emulation`` replaces the model's forward, with a profile of compute_profile.py;
the engine calls ``update`` where it would let the optimiser step. Weights stay what they are, and no
loss means anything.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.emulation.compute_profile import Layer, Profile, how_to_make
from common.errors import UserError

_SCALE = 1e-3  # of generated gradients


class Emulation:
    """Makes a model take a profile's times: its ``forward`` is replaced, ``update`` stands for the optimiser's step.

    Deadlines are absolute: from the first layer of forward to the last one of backward each layer ends when the sum of the
    times up to it has passed. What a busy machine is late with one layer is made up in the next ones, and so is what a hook
    takes; only time that is lost in the end stays lost.

    Parameters
    ----------
    model : with its final parameters, in their final strides.
    rank : of this process: each has gradients of its own.
    classes : numbers that the model puts out for a sample.

    Raises UserError where the model's parameters are not those of the profile.
    """

    def __init__(self, model: nn.Module, profile: Profile, *, rank: int, classes: int) -> None:
        self._profile, self._classes = profile, classes
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_parameters(profile, trained)
        generator = torch.Generator().manual_seed(rank)
        self._layers = [
            (
                layer,
                [trained[name] for name in layer.parameters],
                [_Gradient(trained[name], generator, rank) for name in layer.parameters],
            )
            for layer in profile.layers
        ]
        self._deadline: float | None = None
        self._backward_passes = 0
        model.forward = self._forward

    def update(self) -> None:
        """Take the optimiser's time; nothing is changed."""
        self._deadline = None  # the exchange before it took what it took
        self._pass(self._profile.update_seconds)
        self._deadline = None

    def _forward(self, inputs: Tensor) -> Tensor:
        samples = len(inputs)
        signal = inputs.new_zeros((samples, self._classes))
        for layer, parameters, gradients in self._layers:
            self._pass(layer.forward.at(samples))
            signal = _EmulatedLayer.apply(
                signal, partial(self._backward, layer, gradients, samples), *parameters
            )
        return signal

    def _backward(
        self, layer: Layer, gradients: "Sequence[_Gradient]", samples: int
    ) -> list[Tensor]:
        if layer is self._profile.layers[-1]:
            self._backward_passes += 1
        self._pass(layer.backward.at(samples))
        return [gradient.of(self._backward_passes) for gradient in gradients]

    def _pass(self, seconds: float) -> None:
        """Sleep until ``seconds`` after the last deadline, or after now where there is none."""
        now = time.perf_counter()
        self._deadline = (now if self._deadline is None else self._deadline) + seconds
        if self._deadline > now:
            time.sleep(self._deadline - now)


class _EmulatedLayer(torch.autograd.Function):
    """A layer in autograd's graph: its backward returns what ``make_gradients`` returns, the gradients of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, make_gradients: Callable[[], list[Tensor]], *parameters: Tensor
    ) -> Tensor:
        ctx.make_gradients = make_gradients
        return signal.clone()  # a few numbers a sample, in place of activations

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        return signal, None, *ctx.make_gradients()


class _Gradient:
    """A parameter's gradient: memory that is filled once. Each pass changes one entry, so that no two passes and no two ranks
    have the same, and costs no more than that.

    What is returned has the parameter's strides and no other owner, so that torch makes it ``p.grad`` as it is, without a
    copy. A strategy that works in place leaves its means in this memory. A pass that torch adds to a gradient (accumulation)
    gets memory of its own, since adding it to itself would double it in every step.
    """

    def __init__(self, parameter: nn.Parameter, generator: torch.Generator, rank: int) -> None:
        self._parameter, self._rank = parameter, rank
        values = torch.empty(parameter.numel()).uniform_(-_SCALE, _SCALE, generator=generator)
        self._first = torch.empty_like(parameter, requires_grad=False)
        self._first.copy_(values.view_as(parameter))
        self._more: Tensor | None = None

    def of(self, number: int) -> Tensor:
        """Return the gradient of backward pass ``number``."""
        tensor = self._first
        if self._parameter.grad is not None:
            if self._more is None:
                self._more = self._first.clone()
            tensor = self._more
        tensor.as_strided((1,), (1,)).fill_(_SCALE * math.sin(number + 100.0 * self._rank))
        return tensor.detach()  # another tensor on the same memory, without another owner


def _check_parameters(profile: Profile, trained: Mapping[str, nn.Parameter]) -> None:
    named = [name for layer in profile.layers for name in layer.parameters]
    wrong = [
        *(set(trained) - set(named)),
        *(set(named) - set(trained)),
        *(name for name in named if named.count(name) > 1),
    ]
    if wrong:
        raise UserError(
            f"--compute: the profile {profile.name} has other parameters than this {profile.model} "
            f"({min(wrong)}, and {len(set(wrong)) - 1} more): {how_to_make(profile.name, profile.model)} anew"
        )
