"""What each optimiser gets, and the weights before and after: params, weights, step, stepped.

``Optimizer.step`` is wrapped twice. The outer wrapper, around torch's own hooks, finds the
outermost optimiser of nested ones (ZeroRedundancyOptimizer). The inner one sits on the classes of
torch.optim and samples ``.grad`` right before the update: after a closure, after the script's hooks
and after the communication of an optimiser that averages in its own ``step``.
"""

import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..sampling import checksum, take
from ..state import Probe
from .gradients import OwnGradients
from .step_hooks import is_torchs_own, wrap_clipping, wrap_optimizers, wrap_scaler
from .watched_optimizer import WatchedOptimizer, is_sharded

_STATE_PARAMETERS = 64


class OptimizerWatch:
    """All optimisers of this process. One gets its number at its first step as the outermost."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._gradients: OwnGradients = probe.gradients
        self._of: Any = weakref.WeakKeyDictionary()
        self._serials: Any = WeakTensorKeyDictionary()
        self._counter = itertools.count()
        self._numbered = 0
        self._stepping: Optimizer | None = None
        self._early: dict[str, Any] | None = None  # the record of a step that is not yet written
        self._written = False
        self._calls = 0
        self.scale = 1.0

    def of(self, optimizer: Optimizer) -> WatchedOptimizer:
        """Return what is known of an optimiser, with the parameters that it has now."""
        if (watched := self._of.get(optimizer)) is None:
            watched = self._of[optimizer] = WatchedOptimizer(built=self._probe.step)
        for row in watched.update(optimizer):
            tensor = row.parameter()
            if tensor not in self._serials:
                self._serials[tensor] = next(self._counter)
            row.serial = self._serials[tensor]
            self._gradients.watch(tensor)
        return watched

    def __iter__(self) -> Iterator[tuple[Optimizer, WatchedOptimizer]]:
        """Iterate over the optimisers that are alive."""
        return iter(list(self._of.items()))

    def forward(self, *_: Any) -> None:
        """Sample the weights before a training forward, until the first backward of the step."""
        if torch.is_grad_enabled():
            for optimizer, watched in self:
                if not watched.weights_written:
                    watched.weights = self.of(optimizer).sample_weights()

    def backward_begin(self, *_: Any) -> None:
        """Keep the weights of this step, and await its exchange."""
        for optimizer, watched in self:
            watched.sent = None
            if not watched.weights_written:
                watched.weights = watched.weights or self.of(optimizer).sample_weights()
                watched.weights_written = True
                self._write_weights(watched)

    def communicate(self, *_: Any) -> None:
        """Sample what is sent, when the first collective after the backward begins."""
        self._calls += 1
        for _optimizer, watched in self:
            if (
                not self._probe.in_backward
                and watched.sent is None
                and watched.micro(self._gradients)
            ):
                watched.sent = watched.sample_gradients()

    def clipped(self, kind: str, parameters: list[Tensor], limit: Any, norm: Any) -> None:
        """Note that gradients have been clipped."""
        clip = [kind, limit, norm, self._calls, self._probe.place()]
        mine = {id(parameter) for parameter in parameters}
        for _optimizer, watched in self:
            if any(id(row.parameter()) in mine for row in watched.rows):
                watched.clips.append(clip)

    def begin(self, optimizer: Optimizer, *, closure: bool) -> bool:
        """Begin a step; return whether it is the outermost one."""
        if self._stepping is not None:
            return False
        self._stepping, self._written, self._early = optimizer, False, None
        watched = self.of(optimizer)
        self._number(watched, optimizer)
        watched.place = self._probe.place()
        if not closure and not is_torchs_own(optimizer):
            self._early = self._sample(watched, optimizer)
        watched.begun = time.monotonic()
        self._probe.tell("step_begin", optimizer)
        return True

    def update_begins(self) -> None:
        """Sample and write the step, right before the first update of the outermost optimiser."""
        if self._stepping is not None and not self._written:
            self._written = True
            self._probe.record("step", **self._sample(self.of(self._stepping), self._stepping))

    def end(self, optimizer: Optimizer) -> None:
        """End the outermost step, which has succeeded."""
        watched = self.of(optimizer)
        if not self._written:  # the script's own class, which calls no step of torch.optim
            if self._early is None or self._early["calls"] != self._calls:
                self._early = self._sample(watched, optimizer)
            self._probe.record("step", **self._early)
        self._probe.record(
            "stepped",
            o=watched.number,
            step=watched.steps,
            seconds=time.monotonic() - watched.begun,
            state=self._state(optimizer),
        )
        for row in watched.rows:
            if (own := row.own(self._gradients)) is not None:
                own.end_step()
        watched.next_step()
        self._calls, self.scale = 0, 1.0
        self._probe.step = max(self._probe.step, watched.steps)

    def leave(self, optimizer: Optimizer, *, succeeded: bool) -> None:
        """Forget the outermost step, also one that has failed."""
        self._stepping, self._early = None, None
        if succeeded:
            self._probe.tell("step_end", optimizer)

    def _number(self, watched: WatchedOptimizer, optimizer: Optimizer) -> None:
        """Give an optimiser its number at its first step; write the parameters that are new."""
        first = watched.number is None
        if first:
            watched.number, self._numbered = self._numbered, self._numbered + 1
        if rows := watched.new_rows(self._probe.parameter_names()):
            name = type(optimizer).__name__
            self._probe.record(
                "params",
                o=watched.number,
                optimizer=name,
                built=watched.built,
                rows=rows,
            )
        if first:
            self._write_weights(watched)

    def _write_weights(self, watched: WatchedOptimizer) -> None:
        if watched.number is not None and watched.weights is not None:
            values = self._probe.samples(watched.weights)
            self._probe.record("weights", o=watched.number, step=watched.steps, values=values)
            watched.weights = None

    def _sample(self, watched: WatchedOptimizer, optimizer: Optimizer) -> dict[str, Any]:
        """Return the fields of the record ``step``."""
        clips = [[c[0], _plain(c[1]), _plain(c[2]), *c[3:]] for c in watched.clips]
        return {
            "o": watched.number,
            "step": watched.steps,
            "optimizer": type(optimizer).__name__,
            **watched.own_fields(self._gradients, self._probe.numbers),
            **watched.gradient_fields(getattr(optimizer, "grad_scale", None), self._probe.numbers),
            "lr": [_plain(group.get("lr")) for group in optimizer.param_groups],
            "settings": _settings(optimizer.param_groups[0]),
            "scale": self.scale,
            "clips": clips,
            "at": watched.place,
        }

    def _state(self, optimizer: Optimizer) -> int | None:
        """Return the hash of the optimiser's state; None if it has none or shares it out."""
        tensors = [tensor for tensor in optimizer.state if isinstance(tensor, Tensor)]
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or any(map(is_sharded, tensors)):
            return None
        states = [optimizer.state[tensor] for tensor in tensors[:_STATE_PARAMETERS]]
        parts = [
            take(state[name])
            for state in states
            for name in sorted(state)
            if isinstance(state[name], Tensor) and state[name].numel()
        ]
        return checksum(parts) if parts else None


def _plain(value: Any) -> float | None:
    """Return a number, also from a tensor; None without one or if it is spread over ranks."""
    if value is None or (isinstance(value, Tensor) and (is_sharded(value) or value.numel() != 1)):
        return None
    return float(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of an optimiser's group, without its parameters."""
    kept = {name: value for name, value in group.items() if name not in ("params", "lr")}
    return {
        name: _plain(value) if isinstance(value, Tensor) else value
        for name, value in kept.items()
        if isinstance(value, (Tensor, bool, int, float, str, list, tuple))
    }


def watch(probe: Probe) -> None:
    """Watch every optimiser, clipping and gradient scaling."""
    watched = OptimizerWatch(probe)
    probe.hear("forward_begin", watched.forward)
    probe.hear("backward_begin", watched.backward_begin)
    probe.hear("communicate", watched.communicate)
    wrap_optimizers(watched, probe)
    wrap_clipping(watched, probe)
    wrap_scaler(watched, probe)
