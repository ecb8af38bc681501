"""Emulated compute: a model's layers sleep for a profile's times and return made-up gradients.

Eight ranks that compute on two cores measure the scheduler. Ranks that sleep leave the cores to the
communication, which stays real, like parameters, hooks, buckets, and the order and moments in which
gradients become ready.

``Emulation`` replaces the model's forward, with a profile of compute_profile.py; the engine calls
``update`` in place of the optimiser's step. Weights never change, and the loss means nothing.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from common.emulation.compute_profile import Layer, Profile, how_to_make
from common.errors import UserError
from common.models.sync_batchnorm import SyncBatchNorm

_SCALE = 1e-3  # of generated gradients


class Emulation:
    """Makes a model take a profile's times; ``update`` replaces the optimiser's step.

    Deadlines are absolute: from the first layer of forward to the last of backward, each layer ends
    when the sum of the times up to it has passed. If a busy machine or a hook delays a layer, the
    next layers make up for it; only a delay at the end remains. Forward pre-hooks and the messages
    of SyncBatchNorm are exceptions: there a layer waits for other ranks, and all later deadlines
    move.

    Parameters
    ----------
    model : with its final parameters, in their final strides.
    rank : of this process; each rank has its own gradients.
    classes : the model's outputs for a sample.

    Raises UserError if the model's parameters are not those of the profile.
    """

    def __init__(self, model: nn.Module, profile: Profile, *, rank: int, classes: int) -> None:
        self._profile = profile
        self._classes = classes
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_parameters(profile, trained)
        generator = torch.Generator().manual_seed(rank)
        self._layers = []
        for layer in profile.layers:
            gradients = [_Gradient(trained[name], generator, rank) for name in layer.parameters]
            self._layers.append(_Layer(layer, _owners(model, layer.parameters), gradients))
        self._model = model
        self._deadline: float | None = None
        model.forward = self._forward

    def update(self, share: float = 1.0) -> None:
        """Sleep for the time of an optimiser that updates that share of the weights.

        No weight changes.
        """
        self._deadline = None  # the exchange takes real time, which later layers must not catch up
        self._pass(share * self._profile.update_seconds)
        self._deadline = None

    def _forward(self, inputs: Tensor) -> Tensor:
        signal = inputs.new_zeros((len(inputs), self._classes))
        for layer in self._layers:
            called = time.perf_counter()
            call: Callable[[Tensor], Tensor] = partial(self._forward_layer, layer, called)
            # Through the modules that own the parameters, so that their hooks run.
            for module in layer.owners:
                module.forward = call
                call = module
            signal = call(signal)
        return signal

    def _forward_layer(self, layer: "_Layer", called: float, signal: Tensor) -> Tensor:
        """Take a layer's time; ``called`` is the moment before the hooks that run before it."""
        if self._deadline is not None:
            self._deadline += time.perf_counter() - called
        samples = len(signal)
        self._exchange(layer, _forward_sums)
        self._pass(layer.times.forward.at(samples))
        # Looked up in each step: a strategy may have replaced them.
        parameters = [self._model.get_parameter(name) for name in layer.times.parameters]
        return _EmulatedLayer.apply(signal, partial(self._backward, layer, samples), *parameters)

    def _backward(self, layer: "_Layer", samples: int) -> list[Tensor]:
        self._exchange(layer, _backward_sums)
        self._pass(layer.times.backward.at(samples))
        return [gradient.next() for gradient in layer.gradients]

    def _exchange(self, layer: "_Layer", sums: Callable[[SyncBatchNorm], Tensor]) -> None:
        """Send the layer's message if it is a SyncBatchNorm, and wait for the ranks."""
        began = time.perf_counter()
        for module in layer.owners:
            if isinstance(module, SyncBatchNorm):
                module.messages.sum(sums(module))
        if self._deadline is not None:
            self._deadline += time.perf_counter() - began

    def _pass(self, seconds: float) -> None:
        """Sleep until ``seconds`` after the last deadline, or from now if there is none."""
        now = time.perf_counter()
        if self._deadline is None:
            self._deadline = now
        self._deadline += seconds
        if self._deadline > now:
            time.sleep(self._deadline - now)


@dataclass(frozen=True)
class _Layer:
    """A layer's times, the modules that own its parameters, and its parameters' gradients."""

    times: Layer
    owners: list[nn.Module]
    gradients: "list[_Gradient]"


def _forward_sums(layer: SyncBatchNorm) -> Tensor:
    """Return a message of the size that the layer sends in forward."""
    return torch.zeros(2 * layer.num_features + 1, dtype=torch.float64)


def _backward_sums(layer: SyncBatchNorm) -> Tensor:
    """Return a message of the size that the layer sends in backward."""
    return torch.zeros(2, layer.num_features)


def _owners(model: nn.Module, parameters: Sequence[str]) -> list[nn.Module]:
    """Return the modules that own these parameters, without ``model``: its hooks run anyway."""
    paths = [name.rpartition(".")[0] for name in parameters]
    return [model.get_submodule(path) for path in dict.fromkeys(paths) if path]


class _EmulatedLayer(torch.autograd.Function):
    """A layer in autograd's graph; its backward returns the gradients from ``make_gradients``."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, make_gradients: Callable[[], list[Tensor]], *parameters: Tensor
    ) -> Tensor:
        ctx.make_gradients = make_gradients
        return signal.clone()  # (samples, classes) in place of activations

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        return signal, None, *ctx.make_gradients()


class _Gradient:
    """A parameter's gradient: memory that is filled once; each pass changes one entry.

    So no two passes and no two ranks have the same gradient. Each returned tensor has the
    parameter's strides and no other owner: torch takes it as ``p.grad`` without a copy, and a
    strategy that works in place leaves its means in this memory.
    """

    def __init__(self, parameter: nn.Parameter, generator: torch.Generator, rank: int) -> None:
        self._parameter = parameter
        self._rank = rank
        self._passes = 0
        values = torch.empty(parameter.numel()).uniform_(-_SCALE, _SCALE, generator=generator)
        self._memory = torch.empty_like(parameter, requires_grad=False)
        self._memory.copy_(values.view_as(parameter))

    @cached_property
    def _to_accumulate(self) -> Tensor:
        """Memory for passes that torch adds to ``p.grad``, since that is ``_memory`` itself."""
        return self._memory.clone()

    def next(self) -> Tensor:
        """Return the gradient of the next backward pass."""
        self._passes += 1
        first_entry = _SCALE * math.sin(self._passes + 100.0 * self._rank)
        tensor = self._memory if self._parameter.grad is None else self._to_accumulate
        tensor.as_strided((1,), (1,)).fill_(first_entry)
        return tensor.detach()  # another tensor on the same memory, so that it has no other owner


def check_parameters(profile: Profile, trained: Mapping[str, nn.Parameter]) -> None:
    """Raise UserError unless the profile names exactly the parameters of ``trained``, once each."""
    times_named = Counter(name for layer in profile.layers for name in layer.parameters)
    repeated = {name for name, times in times_named.items() if times > 1}
    wrong = repeated | (times_named.keys() ^ trained.keys())
    if wrong:
        raise UserError(
            f"--compute: the parameters in the profile {profile.name} differ from this "
            f"{profile.model}'s ({len(wrong)}, the first is {min(wrong)}): "
            f"{how_to_make(profile.name, profile.model)}"
        )
