"""What each optimiser gets, and what this rank computed for it: params, weights, step, stepped.

What no optimiser gets, of a model that one trains, is in the record unapplied.

A hook on each parameter sees this rank's gradient before it is added to ``.grad``, so also before
DDP averages it (``OwnSum``). ``step`` is replaced in each class of torch.optim, and in each
class of the script's when torch first makes one. torch's own hooks (register_step_pre_hook) run
before that, the global ones even before the script's, so they would see too little. The first call
of torch.optim samples ``.grad`` right before the update: after a closure, and after what a class
of the script's communicates in its ``step``. The outermost call counts the step.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from .coordinates import COORDINATES
from .sampling import checksum, is_sampled, is_sharded, join, square_norm, take, total, wide
from .state import Probe, named, patch, wrapped

_STATE_PARAMETERS = 64
_AT_EPOCHS_ENDS = 2  # batches


@dataclass(eq=False)
class OwnSum:
    """The sum of one parameter's own gradients since its ``.grad`` was last cleared.

    samples : None until a gradient arrives; NaN where nobody knows what the sum should hold.
    square : the sum of the squares of all numbers of a single gradient; None for a sum of several.
    backwards : how many backward passes reached it since the last step or clearing.
    backward : the number of the latest of these in the process; -1 before the first.
    used : samples of ``.grad`` at the latest update that was sampled; None before the first.
    kept : whether ``.grad`` still held just that when this sum began; None where it was empty.
    applied : an optimiser that holds the parameter has taken a step.
    unapplied : the sampled steps at whose end ``.grad`` held a gradient, before ``applied``.
    first : samples of the parameter at the first of these; None before it.
    """

    samples: Tensor | None = None
    square: Tensor | None = None
    backwards: int = 0
    backward: int = -1
    used: Tensor | None = None
    kept: Tensor | None = None
    applied: bool = False
    unapplied: int = 0
    first: Tensor | None = None

    def add(self, gradient: Tensor, held: Tensor | None, backward: int) -> None:
        """Add the gradient of one call of the hook.

        held : ``.grad`` of the parameter before the gradient is added to it; None if it is empty,
            or the gradient is not added to it.
        backward : the number of the backward pass, in which the hook may be called several times.
        """
        is_new = backward != self.backward
        if is_new:
            self._see_kept(held)
        samples = take(gradient)
        if self.samples is None or (is_new and held is None):
            self.square = square_norm(gradient)
            if self.backwards:  # .grad vanished without a step, perhaps to be added up elsewhere
                samples = samples * math.nan
                self.backwards = 0
        else:
            earlier = wide(self.samples)
            if is_new and held is not None:
                # The script may have set it to zero: a factor, since an ``if`` waits for the GPU.
                earlier = earlier * (take(held) != 0).any()
            samples = earlier + samples
            self.square = None
        self.samples = samples
        self.backward = backward
        if is_new:
            self.backwards += 1

    def _see_kept(self, held: Tensor | None) -> None:
        """See at the first gradient of a sum whether ``.grad`` still holds the one used last."""
        if held is None or self.used is None:
            self.kept = None
        elif not self.backwards:
            before = take(held)
            self.kept = (before == self.used).all() & (before != 0).any()

    def see_unapplied(self, parameter: Tensor) -> None:
        """See at the end of a step whether it has left a gradient unused."""
        left = self.samples
        if self.applied or left is None or parameter.grad is None or not left.any():
            return
        if self.first is None:
            self.first = take(parameter)
        self.unapplied += 1

    def is_unapplied(self, parameter: Tensor) -> bool:
        """Return whether no step has used the gradients, and the parameter is as it was."""
        if self.first is None or self.applied:
            return False
        return torch.equal(self.first, take(parameter))


class WatchedOptimizer:
    """The parameters of one optimiser, and what is known of its current step.

    built : the step at which it was first seen.
    at : the script's line that made it.
    steps : how many it has done.
    number : None until its parameters are written.
    tensors : "group.index" of its parameters; FSDP2's, which are sharded, are left out.
    written : how many of these are in a record ``params``.
    weighed : the step whose weights have been written; -1 before the first.
    clips : see the record ``step``.
    unclipped : samples of the gradients that this step has clipped, before that.
    unscaled : GradScaler has divided the gradients of this step by its scale.
    """

    def __init__(self, built: int, at: list[Any] | None) -> None:
        self.built = built
        self.at = at
        self.steps = 0
        self.written = 0
        self.weighed = -1
        self.number: int | None = None
        self.tensors: dict[Tensor, str] = {}
        self.clips: list[list[Any]] = []
        self.unclipped: dict[Tensor, Tensor] = {}
        self.unscaled = False


class GradientWatch:
    """All optimisers of this process, and the own gradients of all parameters.

    An optimiser gets its number at the first backward, or at its first step if another one holds
    its parameters too.

    known : the own gradients by parameter, as far as they can be seen.
    serials : by tensor, the number of its own, the same in all optimisers.
    last_seconds : time.monotonic() when the latest gradient arrived.
    backward : the number of backward passes so far.
    alone : within torch.autograd.grad, which leaves ``.grad`` as it is.
    _of : what is known of each optimiser.
    _made : by parameter, the script's line that made its model.
    _outermost : the optimiser whose step is under way, as called by the script.
    _sampled : what its record ``step`` will say of gradients.
    _final : nothing can change these gradients before the update any more.
    _calls : the collectives since the last step.
    _scale : of GradScaler in this step, or 1.
    _epoch : the training epoch that gave the latest batch, or None.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._epoch: Any = None
        self.known: Any = WeakTensorKeyDictionary()
        self.last_seconds = 0.0
        self.backward = 0
        self.alone = False
        self._of: Any = weakref.WeakKeyDictionary()
        self._made: Any = WeakTensorKeyDictionary()
        self.serials: Any = WeakTensorKeyDictionary()
        self._next_serial = itertools.count()
        self._next_number = itertools.count()
        self._outermost: Optimizer | None = None
        self._sampled: dict[str, Any] = {}
        self._final = False
        self._calls = 0
        self._scale = 1.0

    def watch(self, tensor: Tensor | None) -> None:
        """See the gradients of a leaf from now on, before any hook that is added later."""
        if tensor is None or not (tensor.requires_grad and tensor.is_leaf):
            return
        if is_sharded(tensor) or tensor in self.known:
            return
        own = OwnSum()
        self.known[tensor] = own
        reference = weakref.ref(tensor)

        @self._probe.guard
        def hook(gradient: Tensor) -> None:
            leaf = reference()
            held = leaf.grad if leaf is not None and not self.alone else None
            own.add(gradient, held, self.backward)
            self.last_seconds = time.monotonic()

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # else saving warns
        tensor.register_hook(hook)

    def zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Forget the sums of the parameters whose ``.grad`` a model or an optimiser clears."""
        original(owner, *args, **kwargs)
        if isinstance(owner, Module):
            tensors = list(owner.parameters())
        else:
            tensors = [tensor for group in owner.param_groups for tensor in group["params"]]
        for tensor in tensors:
            own = self.known.get(tensor)
            if own is not None:
                own.samples = None
                own.backwards = 0

    def of(self, optimizer: Optimizer) -> WatchedOptimizer:
        """Return what is known of an optimiser, with the parameters that it has now."""
        if optimizer not in self._of:
            self._of[optimizer] = WatchedOptimizer(self._probe.step, self._probe.place())
        watched: WatchedOptimizer = self._of[optimizer]
        for index, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                if tensor not in watched.tensors and not is_sharded(tensor):
                    watched.tensors[tensor] = f"{index}.{place}"
                    self.watch(tensor)
        return watched

    def reached(self) -> list[int]:
        """Return the numbers of the optimisers whose parameters the latest backward has reached."""
        numbers = []
        for watched in list(self._of.values()):
            sums = [self.known.get(tensor) for tensor in watched.tensors]
            reaches = any(own is not None and own.backward == self.backward for own in sums)
            if reaches and watched.number is not None:
                numbers.append(watched.number)
        return sorted(numbers)

    def backward_begin(self, *_: Any) -> None:
        """Count the backward pass, and write the weights before the first one of a step."""
        self.backward += 1
        for optimizer, watched in list(self._of.items()):
            if watched.number is None and any(key in self.serials for key in watched.tensors):
                continue  # another one's parameters: perhaps it lies within that one
            self._write_parameters(optimizer)

    def batch_begin(self, epoch: Any) -> None:
        """Remember which epoch the next batch is of."""
        self._epoch = epoch

    def ending(self) -> None:
        """Write the weights with which the script ends, and what it leaves without an optimiser."""
        for watched in list(self._of.values()):
            if watched.number is not None:
                self._write_weights(watched, last=True)
        for model in self._probe.forwards.models():
            self._write_unapplied(model)

    def _write_unapplied(self, model: dict[str, Tensor]) -> None:
        """Write which parameters of a model that trains get gradients, and never change."""
        sums = {name: self.known.get(tensor, OwnSum()) for name, tensor in model.items()}
        left = [name for name, own in sums.items() if own.is_unapplied(model[name])]
        if left and any(own.applied for own in sums.values()):
            tensors = [model[name] for name in left]
            self._probe.record(
                "unapplied",
                names=left,
                steps=min(sums[name].unapplied for name in left),
                numbers=_numel(tensors),
                every=_numel(model.values()),
                at=self._model_line(tensors),
            )

    def _is_sampled(self, watched: WatchedOptimizer) -> bool:
        """Return whether the numbers of an optimiser's current step are sampled."""
        if is_sampled(watched.steps):
            return True
        if self._epoch is None:
            return False
        length = self._epoch.limit or self._epoch.loader.facts.batches
        left = _AT_EPOCHS_ENDS if length is None else length - self._epoch.given
        return bool(min(left, self._epoch.given) < _AT_EPOCHS_ENDS)

    def communicate(self, tensors: list[Tensor]) -> None:
        """Count the collectives of a step."""
        if tensors:
            self._calls += 1

    def add_param_group(self, original: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> None:
        """See the gradients of parameters as soon as an optimiser gets them."""
        original(optimizer, *args, **kw)
        self._probe.guard(self.of)(optimizer)

    def clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that clips gradients, and note it."""
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._probe.guard(self._see_unclipped)(tensors)
        result = original(tensors, *args, **kwargs)
        self._probe.guard(self._clipped)(tensors, named(original, (tensors, *args), kwargs), result)
        return result

    def _see_unclipped(self, tensors: list[Tensor]) -> None:
        """Take samples of gradients that are about to be clipped for the first time in a step."""
        for watched in list(self._of.values()):
            if not self._is_sampled(watched):
                continue
            for tensor in tensors:
                if tensor in watched.tensors and tensor.grad is not None:
                    watched.unclipped.setdefault(tensor, take(tensor.grad))

    def _clipped(self, tensors: list[Tensor], given: dict[str, Any], result: Any) -> None:
        kind = "value" if "clip_value" in given else "norm"
        limit = given.get("clip_value", given.get("max_norm"))
        total_norm = given.get("total_norm", result)
        clip = [kind, _plain(limit), _plain(total_norm), self._calls, self._probe.place()]
        for watched in list(self._of.values()):
            if any(tensor in watched.tensors for tensor in tensors):
                watched.clips.append([*clip, watched.unscaled])

    def scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Note by what GradScaler has multiplied the loss of a step."""
        if getattr(scaler, "_scale", None) is not None:
            self._scale = float(scaler._scale)
        return original(scaler, *args, **kwargs)

    def unscale(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        """Note that GradScaler divides an optimiser's gradients by its scale."""
        result = original(scaler, optimizer, *args, **kw)
        if optimizer in self._of:
            self._of[optimizer].unscaled = True
        return result

    def scaler_updates(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Forget the step that GradScaler may have left out: update() ends it."""
        for watched in list(self._of.values()):
            watched.unscaled = False
            watched.clips = []
            watched.unclipped = {}
        return original(*args, **kwargs)

    def watch_step(self, original: Any, _optimizer: Optimizer, step: Any) -> Any:
        """See the ``step`` of a class of the script's, which torch gets for its hooks."""
        if not _is_torchs(step):
            step = wrapped(step, self.step)
        return original(step)

    def step(self, step: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call the ``step`` of a class, which may call that of its parent or of an optimiser.

        The first of torch.optim's knows when the update begins. A class of the script's may still
        average the gradients, and a closure computes them: then they are sampled at the end.

        The call from the script sets ``_outermost`` and calls this function again, which then
        takes the first branch, as all calls within it do.
        """
        closure = bool(args or kwargs.get("closure"))
        if self._outermost is not None:
            if not closure and not self._final:
                self._probe.guard(self._sample)(optimizer, final=_is_torchs(step))
            return step(optimizer, *args, **kwargs)
        self._outermost = optimizer
        self._final = False
        calls_before = self._calls
        try:
            self._probe.guard(self._write_parameters)(optimizer)
            self._probe.tell("step_begin", optimizer)
            begun = time.monotonic()
            result = self.step(step, optimizer, *args, **kwargs)
            seconds = time.monotonic() - begun
            may_have_changed = closure or calls_before != self._calls
            if may_have_changed and not self._final:
                self._probe.guard(self._sample)(optimizer, final=True)
            self._probe.guard(self._end)(optimizer, seconds)
        finally:
            self._outermost = None
        return result

    def _write_parameters(self, optimizer: Optimizer) -> None:
        """Write the parameters that are new, and the weights of a step that is sampled."""
        watched = self.of(optimizer)
        if watched.number is None:
            watched.number = next(self._next_number)
        new = list(watched.tensors.items())[watched.written :]
        if new:
            self._probe.record(
                "params",
                o=watched.number,
                optimizer=type(optimizer).__name__,
                built=watched.built,
                at=watched.at,
                model=self._model_line(tensor for tensor, _ in new),
                rows=self._rows(watched, new),
            )
            watched.written = len(watched.tensors)
        if self._is_sampled(watched):
            self._write_weights(watched)

    def _write_weights(self, watched: WatchedOptimizer, *, last: bool = False) -> None:
        """Write the weights before the current step, unless they are written."""
        if watched.weighed < watched.steps:
            watched.weighed = watched.steps
            values = self._probe.samples(map(take, watched.tensors))
            self._probe.record(
                "weights", o=watched.number, step=watched.steps, values=values, last=last
            )

    def register(self, module: Module, _name: str, tensor: Tensor | None) -> None:
        """Watch a parameter that a module gets, and remember the script's line that makes it."""
        self.watch(tensor)
        if tensor is not None and tensor not in self._made:
            self._made[tensor] = self._probe.place(_outside_models(sys._getframe(1)))

    def _model_line(self, tensors: Iterable[Tensor]) -> list[Any] | None:
        """Return the line that makes the first of these parameters; None if none was seen."""
        lines = (self._made.get(tensor) for tensor in tensors)
        return next((line for line in lines if line is not None), None)

    def _rows(self, watched: WatchedOptimizer, new: list[tuple[Tensor, str]]) -> list[list[Any]]:
        """Return the rows of the record ``params`` for new parameters and their places.

        A row is [key, name, shape, dtype, numel, serial].
        """
        names = self._probe.forwards.names()
        rows = []
        for tensor, place in new:
            key = f"{watched.number}.{place}"
            name = names.get(id(tensor), key)
            dtype = str(tensor.dtype)[len("torch.") :]
            # drawn in vain if the tensor has one, from another optimiser: they need only differ
            new_serial = next(self._next_serial)
            serial = self.serials.setdefault(tensor, new_serial)
            rows.append([key, name, list(tensor.shape), dtype, tensor.numel(), serial])
        return rows

    def _sample(self, optimizer: Optimizer, *, final: bool) -> None:
        """Sample what the outermost optimiser gets now: the fields of ``step`` on gradients.

        optimizer : the one whose ``step`` is called, which may lie within the outermost.
        """
        self._final = final
        self._sampled = {}  # stays empty if the sampling fails
        watched = self._of[self._outermost]
        tensors = list(watched.tensors)
        self._sampled = {"micro": self._backwards(tensors), "kept": self._kept(tensors)}
        if self._is_sampled(watched):
            scale = float(getattr(optimizer, "grad_scale", None) or 1)  # a fused one divides by it
            self._sampled.update(self._sample_own(tensors), **self._sample_held(tensors, scale))
            if watched.unclipped:
                self._sampled["unclipped"] = self._sample_unclipped(watched)

    def _backwards(self, tensors: list[Tensor]) -> int:
        """Return how many backward passes have reached the parameters since the last step."""
        owned = [self.known.get(tensor) for tensor in tensors]
        return max((own.backwards for own in owned if own and own.samples is not None), default=0)

    def _kept(self, tensors: list[Tensor]) -> int:
        """Return of how many parameters ``.grad`` was not cleared since the last update."""
        owned = [self.known.get(tensor) for tensor in tensors]
        flags = [own.kept.reshape(1) for own in owned if own and own.kept is not None]
        return int(sum(join(flags)))

    def _sample_own(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Return the fields on this rank's own gradients: own, own_norm."""
        samples = []
        squares = []
        for tensor in tensors:
            own = self.known.get(tensor)
            if own is None:
                samples.append(_zeros(tensor) + math.nan)
            elif own.samples is None:
                samples.append(_zeros(tensor))
            else:
                samples.append(own.samples)
                squares.append(own.square)
        all_single = all(square is not None for square in squares)
        return {
            "own": self._probe.samples(samples),
            "own_norm": total(squares) if all_single else None,
        }

    def _sample_held(self, tensors: list[Tensor], scale: float) -> dict[str, Any]:
        """Return the fields on what ``.grad`` holds, divided by the scale: got, got_norm."""
        samples = []
        squares = []
        for tensor in tensors:
            held = tensor.grad
            if held is None:
                samples.append(_zeros(tensor))
            else:
                values = take(held)
                own = self.known.get(tensor)
                if own is not None:
                    own.used = values
                samples.append(values / scale)
                squares.append(square_norm(held))
        return {"got": self._probe.samples(samples), "got_norm": total(squares) / scale}

    def _sample_unclipped(self, watched: WatchedOptimizer) -> list[int]:
        """Return samples of what ``.grad`` held before it was clipped, if it was."""
        samples = []
        for tensor in watched.tensors:
            held = _zeros(tensor) if tensor.grad is None else take(tensor.grad)
            samples.append(watched.unclipped.get(tensor, held))
        return self._probe.samples(samples)

    def _end(self, optimizer: Optimizer, seconds: float) -> None:
        """Write the records of the outermost step, which has succeeded, and await the next one."""
        watched = self._of[optimizer]
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
        for tensor in watched.tensors:
            own = self.known.get(tensor)
            if own is not None:
                own.backwards = 0
                own.kept = None
                own.applied = True
        if is_sampled(watched.steps):
            for tensor, own in list(self.known.items()):
                own.see_unapplied(tensor)
        watched.steps += 1
        watched.clips = []
        watched.unclipped = {}
        watched.unscaled = False
        self._calls = 0
        self._scale = 1.0
        self._probe.step = max(self._probe.step, watched.steps)
        self._probe.tell("step_end", optimizer)


def _outside_models(frame: Any) -> Iterator[tuple[Any, int]]:
    """Yield the frames of a stack and their lines, without those that build a model from within."""
    for outer, number in traceback.walk_stack(frame):
        builds = outer.f_code.co_name == "__init__"
        if not (builds and isinstance(outer.f_locals.get("self"), Module)):
            yield outer, number


def _is_torchs(step: Any) -> bool:
    """Return whether this is the ``step`` of a class of torch.optim."""
    return str(step.__module__).startswith("torch.optim.")


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(map(Tensor.numel, tensors))


def _zeros(parameter: Tensor) -> Tensor:
    """Return the samples of a gradient that never came."""
    return torch.zeros(min(parameter.numel(), COORDINATES))


def _state_of(optimizer: Optimizer) -> int | None:
    """Return the hash of an optimiser's state; None if it has none or shares it out."""
    parameters = [key for key in optimizer.state if isinstance(key, Tensor)][:_STATE_PARAMETERS]
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or any(map(is_sharded, parameters)):
        return None
    parts = []
    for parameter in parameters:
        for _, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor) and value.numel():
                parts.append(take(value))
    return checksum(parts) if parts else None


def _plain(value: Any) -> float | None:
    """Return a number, also from a tensor; None without one or if it is spread over ranks."""
    several = isinstance(value, Tensor) and (is_sharded(value) or value.numel() != 1)
    return None if value is None or several else float(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of an optimiser's group, without its parameters."""
    settings: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "lr"):
            continue
        if isinstance(value, Tensor):
            settings[name] = _plain(value)
        elif isinstance(value, (bool, int, float, str)):
            settings[name] = value
    return settings


def watch(probe: Probe) -> None:
    """Watch every parameter, optimiser, clipping and gradient scaling."""
    probe.gradients = watched = GradientWatch(probe)
    hook = probe.guard(watched.register)
    register_module_parameter_registration_hook(hook)
    patch(torch.nn.Module, zero_grad=watched.zero_grad)
    patch(
        Optimizer,
        zero_grad=watched.zero_grad,
        add_param_group=watched.add_param_group,
        profile_hook_step=watched.watch_step,
    )
    clips = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")
    for owner in (importlib.import_module("torch.nn.utils.clip_grad"), torch.nn.utils):
        patch(owner, **dict.fromkeys(clips, watched.clip))
    patch(
        getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler),
        step=watched.scale,
        unscale_=watched.unscale,
        update=watched.scaler_updates,
    )
    for optimizer in Optimizer.__subclasses__():  # torch's alone, so far
        patch(optimizer, step=watched.step)

    probe.listeners.append(watched)
