"""What each optimiser gets, and what this rank computed for it: params, weights, step, stepped.

A hook on each parameter sees this rank's gradient before it is added to ``.grad``, so also before
DDP averages it (``OwnGradients``). ``step`` is replaced in each class of torch.optim, and in each
class of the script's when torch first makes one. torch's own hooks (register_step_pre_hook) run
before that, the global ones even before the script's, so they would see too little. The first call
of torch.optim samples ``.grad`` right before the update: after a closure, and after what a class
of the script's communicates in its ``step``. The outermost call counts the step.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from .coordinates import coordinates
from .sampling import checksum, is_sharded, square_norm, take, total, wide
from .state import Probe, compiling, patch

_STATE_PARAMETERS = 64


class OwnSum:
    """The sum of one parameter's own gradients since its ``.grad`` was last cleared.

    ``backwards`` counts the backward passes since the last step or clearing. ``unclear`` is True
    when ``.grad`` vanished between two of them, so that nobody knows what the sum should hold.
    ``square`` is the sum of the squares of all numbers, known after a single gradient.
    """

    def __init__(self, *, unclear: bool = False) -> None:
        self.clear()
        self.unclear = unclear

    def clear(self) -> None:
        """Forget the sum: ``.grad`` has been cleared."""
        self.samples: Tensor | None = None
        self.square: Tensor | None = None
        self.backwards, self.backward = 0, -1
        self.stepped = self.unclear = False

    def add(self, gradient: Tensor, held: Tensor | None, *, backward: int, alone: bool) -> None:
        """Add the gradient of one call of the hook.

        Parameters
        ----------
        held : ``.grad`` of the parameter before the gradient is added to it.
        backward : the number of the backward pass.
        alone : the gradient is returned by torch.autograd.grad, not added to ``.grad``.
        """
        if self.samples is not None and self.backward != backward:
            if held is None or alone:  # it was cleared without a word
                unclear = not self.stepped
                self.clear()
                self.unclear = unclear
            else:
                self.samples = wide(self.samples) * (take(held) != 0).any()
        samples, first = take(gradient), self.samples is None
        self.square = square_norm(gradient) if first else None
        self.samples = samples if self.samples is None else wide(self.samples) + samples
        self.backwards += self.backward != backward
        self.backward, self.stepped = backward, False

    def read(self, numel: int) -> Tensor:
        """Return the samples: zeros if no gradient arrived, NaN if nobody knows."""
        size = len(coordinates(numel))
        if self.unclear or (self.samples is not None and len(self.samples) != size):
            return torch.full((size,), math.nan)
        return torch.zeros(size) if self.samples is None else self.samples


class OwnGradients:
    """The own gradients of all parameters of this process.

    ``last_seconds`` is the time of the latest gradient (time.monotonic()), ``backward`` the number
    of backward passes so far; ``alone`` is True within torch.autograd.grad.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._known: Any = WeakTensorKeyDictionary()
        self.last_seconds, self.backward, self.alone = 0.0, 0, False

    def tensors(self) -> list[Tensor]:
        """Return all parameters that are watched."""
        return list(self._known.keys())

    def of(self, tensor: Tensor) -> OwnSum | None:
        """Return the own gradient of a parameter; None if its gradients cannot be seen."""
        return self._known.get(tensor)

    def watch(self, tensor: Tensor | None) -> None:
        """See the gradients of a leaf from now on, before any hook that is added later."""
        if tensor is None or is_sharded(tensor) or tensor in self._known or compiling():
            return
        if not (tensor.requires_grad and tensor.is_leaf):
            return
        self._known[tensor] = own = OwnSum()
        reference = weakref.ref(tensor)

        @self._probe.guard
        def hook(gradient: Tensor) -> None:
            if not compiling():
                leaf = reference()
                held = None if leaf is None else leaf.grad
                own.add(gradient, held, backward=self.backward, alone=self.alone)
                self.last_seconds = time.monotonic()

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # else saving warns
        tensor.register_hook(hook)

    def clear(self, tensors: Iterable[Tensor]) -> None:
        """Forget the sums of parameters whose ``.grad`` has been cleared."""
        for tensor in tensors:
            if (own := self._known.get(tensor)) is not None:
                own.clear()


class WatchedOptimizer:
    """The parameters of one optimiser, and what is known of its current step.

    Parameters
    ----------
    built : the step at which it was first seen.
    number : None until its parameters are written.
    parameters : [tensor, group, place in it]; FSDP2's, which are sharded, are left out.
    weighed : the step whose weights have been written.
    clips : see the record ``step``.
    """

    def __init__(self, built: int) -> None:
        self.built, self.steps, self.written, self.weighed = built, 0, 0, -1
        self.number: int | None = None
        self.parameters: list[tuple[Tensor, int, int]] = []
        self.clips: list[list[Any]] = []

    def tensors(self) -> list[Tensor]:
        """Return the parameters."""
        return [tensor for tensor, _, _ in self.parameters]


class OptimizerWatch:
    """All optimisers of this process.

    One gets its number at the first backward, or at its first step if another one holds its
    parameters too.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._own: OwnGradients = probe.gradients
        self._of: Any = weakref.WeakKeyDictionary()
        self._serials: Any = WeakTensorKeyDictionary()
        self._counter, self._numbers = itertools.count(), itertools.count()
        self._stepping: WatchedOptimizer | None = None
        # What the next record ``step`` says of gradients, and whether this is final.
        self._sampled: dict[str, Any] = {}
        self._final = False
        self._calls, self._scale = 0, 1.0

    def of(self, optimizer: Optimizer) -> WatchedOptimizer:
        """Return what is known of an optimiser, with the parameters that it has now."""
        if (watched := self._of.get(optimizer)) is None:
            watched = self._of[optimizer] = WatchedOptimizer(self._probe.step)
        known = {id(one) for one in watched.tensors()}
        for index, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                if id(tensor) not in known and not is_sharded(tensor):
                    watched.parameters.append((tensor, index, place))
                    self._own.watch(tensor)
        return watched

    def backward_begin(self, *_: Any) -> None:
        """Count the backward pass, and write the weights before the first one of a step."""
        self._own.backward += 1
        for optimizer, watched in list(self._of.items()):
            # another one's parameters: perhaps an optimiser within that one
            inner = any(one in self._serials for one in watched.tensors())
            if watched.number is not None or not inner:
                self._write_parameters(optimizer)

    def communicate(self, *_: Any) -> None:
        """Count the collectives of a step."""
        self._calls += 1

    def clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that clips gradients, and note it."""
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        result = original(tensors, *args, **kwargs)
        named = kwargs.get("max_norm", kwargs.get("clip_value"))
        given = kwargs.get("total_norm", args[1] if len(args) > 1 else None)
        kind = "value" if "value" in original.__name__ else "norm"
        norm = given if result is None else result
        self._probe.guard(self._clipped)(kind, tensors, args[0] if args else named, norm)
        return result

    def _clipped(self, kind: str, tensors: list[Tensor], limit: Any, norm: Any) -> None:
        clip = [kind, _plain(limit), _plain(norm), self._calls, self._probe.place()]
        clipped = {id(one) for one in tensors}
        for watched in list(self._of.values()):
            if any(id(one) in clipped for one in watched.tensors()):
                watched.clips.append(clip)

    def scaled(self, scaler: Any) -> None:
        """Note by what GradScaler has multiplied the loss of a step."""
        if getattr(scaler, "_scale", None) is not None and getattr(scaler, "_enabled", True):
            self._scale = float(scaler._scale)

    def watch_step(self, step: Any, *, torchs: bool) -> Any:
        """Return the ``step`` of a class as it is to be: of torch.optim, or of the script."""
        if hasattr(step, "lab_audit"):
            return step

        @functools.wraps(step)
        def watched(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return step(self_, *args, **kwargs)
            return self._step(step, torchs, self_, args, kwargs)

        watched.lab_audit = True  # type: ignore[attr-defined]  # ours
        return watched

    def _step(self, step: Any, torchs: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Call the ``step`` of a class, which may call that of its parent or of an optimiser.

        The first of torch.optim's knows when the update begins. A class of the script's may still
        average the gradients, and a closure computes them: then they are sampled at the end.
        """
        if self._stepping is not None:
            return self._update(step, torchs, optimizer, args, kwargs)
        watched, calls = self.of(optimizer), self._calls
        self._stepping, self._final = watched, False
        try:
            self._probe.guard(self._begin)(optimizer)
            begun = time.monotonic()
            result = self._update(step, torchs, optimizer, args, kwargs)
            seconds = time.monotonic() - begun
            if args or kwargs.get("closure") is not None or calls != self._calls:
                self._sample(optimizer, final=True)
            self._probe.guard(self._end)(watched, optimizer, seconds)
        finally:
            self._stepping = None
        self._probe.tell("step_end", optimizer)
        return result

    def _update(self, step: Any, torchs: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Call ``step``, and sample the gradients before it; a closure computes them within it."""
        if not args and kwargs.get("closure") is None:
            self._sample(optimizer, final=torchs)
        return step(optimizer, *args, **kwargs)

    def _begin(self, optimizer: Optimizer) -> None:
        self._write_parameters(optimizer)
        self._probe.tell("step_begin", optimizer)

    def _write_parameters(self, optimizer: Optimizer) -> None:
        """Write the parameters that are new, and the weights unless this step's are written."""
        watched = self.of(optimizer)
        if watched.number is None:
            watched.number = next(self._numbers)
        new, watched.written = watched.parameters[watched.written :], len(watched.parameters)
        names = self._probe.parameter_names() if new else {}
        rows = []
        for tensor, group, place in new:
            serial = self._serials.setdefault(tensor, next(self._counter))
            key, kind = f"{watched.number}.{group}.{place}", str(tensor.dtype).split(".")[1]
            name, shape = names.get(id(tensor), key), list(tensor.shape)
            rows.append([key, name, shape, kind, tensor.numel(), serial])
        if rows:
            kind = type(optimizer).__name__
            self._probe.record(
                "params", o=watched.number, optimizer=kind, built=watched.built, rows=rows
            )
        if watched.weighed < watched.steps:
            watched.weighed = watched.steps
            values = self._probe.samples([take(one) for one in watched.tensors()])
            self._probe.record("weights", o=watched.number, step=watched.steps, values=values)

    def _sample(self, optimizer: Optimizer, *, final: bool) -> None:
        """Sample what the outermost optimiser gets now, unless this has been done finally."""
        if not self._final and self._stepping is not None:
            self._final = final
            self._sampled = self._probe.guard(self._gradients)(self._stepping, optimizer) or {}

    def _gradients(self, watched: WatchedOptimizer, optimizer: Optimizer) -> dict[str, Any]:
        """Return the fields of the record ``step`` that tell of gradients."""
        divisor = getattr(optimizer, "grad_scale", None)  # a fused optimiser divides by it itself
        scale = 1.0 if divisor is None else float(divisor)
        owns = [self._own.of(tensor) or OwnSum(unclear=True) for tensor in watched.tensors()]
        seen = [own for own in owns if own.samples is not None]
        squares = [own.square for own in seen if own.square is not None]
        held = [tensor.grad for tensor in watched.tensors()]
        pairs = list(zip(watched.tensors(), owns, held))
        return {
            "micro": max((own.backwards for own in owns), default=0),
            "own": self._probe.samples([own.read(tensor.numel()) for tensor, own, _ in pairs]),
            "own_norm": total(squares) if len(squares) == len(seen) else None,
            "got": self._probe.samples(
                [
                    torch.zeros(len(coordinates(tensor.numel())))
                    if grad is None
                    else take(grad) / scale
                    for tensor, _, grad in pairs
                ]
            ),
            "got_norm": total([square_norm(grad) for grad in held if grad is not None]) / scale,
        }

    def _end(self, watched: WatchedOptimizer, optimizer: Optimizer, seconds: float) -> None:
        """Write the records of the outermost step, which has succeeded, and await the next one."""
        numbers = {"o": watched.number, "step": watched.steps}
        groups = optimizer.param_groups
        self._probe.record(
            "step",
            **numbers,
            **self._sampled,
            optimizer=type(optimizer).__name__,
            lr=[_plain(group.get("lr")) for group in groups],
            settings=_settings(groups[0]),
            scale=self._scale,
            clips=watched.clips,
            at=self._probe.place(),
        )
        self._probe.record("stepped", **numbers, seconds=seconds, state=_state_of(optimizer))
        for own in map(self._own.of, watched.tensors()):
            if own is not None:
                own.stepped, own.backwards = True, 0
        watched.steps, watched.clips = watched.steps + 1, []
        self._calls, self._scale = 0, 1.0
        self._probe.step = max(self._probe.step, watched.steps)


def _state_of(optimizer: Optimizer) -> int | None:
    """Return the hash of an optimiser's state; None if it has none or shares it out."""
    tensors = [one for one in optimizer.state if isinstance(one, Tensor)][:_STATE_PARAMETERS]
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or any(map(is_sharded, tensors)):
        return None
    states = [value for one in tensors for _, value in sorted(optimizer.state[one].items())]
    parts = [take(value) for value in states if isinstance(value, Tensor) and value.numel()]
    return checksum(parts) if parts else None


def _plain(value: Any) -> float | None:
    """Return a number, also from a tensor; None without one or if it is spread over ranks."""
    if value is None or (isinstance(value, Tensor) and (is_sharded(value) or value.numel() != 1)):
        return None
    return float(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of an optimiser's group, without its parameters."""
    return {
        name: _plain(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "lr") and isinstance(value, (Tensor, bool, int, float, str))
    }


def watch(probe: Probe) -> None:
    """Watch every parameter, optimiser, clipping and gradient scaling."""
    probe.gradients = own = OwnGradients(probe)
    watched = OptimizerWatch(probe)

    def zero_grad(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(owner, *args, **kwargs)
        groups = (
            owner.param_groups if isinstance(owner, Optimizer) else [{"params": owner.parameters()}]
        )
        probe.guard(own.clear)(tensor for group in groups for tensor in group["params"])
        return result

    def add_param_group(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        probe.guard(watched.of)(optimizer)

    def step(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        probe.guard(watched.scaled)(scaler)
        return original(scaler, *args, **kwargs)

    hook = probe.guard(own.watch)
    register_module_parameter_registration_hook(lambda _module, _name, tensor: hook(tensor))
    patch(torch.nn.Module, "zero_grad", zero_grad)
    patch(Optimizer, "zero_grad", zero_grad)
    patch(Optimizer, "add_param_group", add_param_group)
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        patch(importlib.import_module("torch.nn.utils.clip_grad"), name, watched.clip)
        patch(torch.nn.utils, name, watched.clip)
    patch(getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler, "step", step)
    for one in vars(torch.optim).values():
        if isinstance(one, type) and issubclass(one, Optimizer) and "step" in vars(one):
            original: Any = one.step
            if getattr(original, "hooked", False):  # by torch, since one was built before
                original = original.__wrapped__
            one.step = watched.watch_step(original, torchs=True)  # type: ignore[method-assign]  # ours
    base: Any = Optimizer
    profile = base.profile_hook_step
    base.profile_hook_step = staticmethod(
        lambda step: profile(watched.watch_step(step, torchs=False))
    )
    probe.hear("backward_begin", watched.backward_begin)
    probe.hear("communicate", watched.communicate)
