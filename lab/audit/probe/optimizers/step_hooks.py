"""The places in torch where ``optimizers`` hears of steps, clipped gradients and loss scaling."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..state import Probe

_MARK = "_lab_audit_inner"


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Return whether the optimiser's step is torch's own, which tells when its update begins."""
    return hasattr(type(optimizer).step, _MARK)


def wrap_optimizers(watch: Any, probe: Probe) -> None:
    """Tell ``watch`` of new parameters, of steps, and of the updates within them."""
    for one in vars(torch.optim).values():
        if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer:
            if "step" not in vars(one):
                continue
            step = one.step
            if getattr(step, "hooked", False):  # one was built before: torch has wrapped it already
                step = step.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
            one.step = _inner(step, watch, probe)  # type: ignore[method-assign]  # ours
    original = Optimizer.profile_hook_step

    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        return _outer(original(func), watch, probe)

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign]  # ours
    add = Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        probe.guard(watch.of)(self)

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]  # ours


def _inner(step: Callable[..., Any], watch: Any, probe: Probe) -> Callable[..., Any]:
    begins = probe.guard(watch.update_begins)

    @functools.wraps(step)
    def inner(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(self, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            begins()
            return step(self, *args, **kwargs)

        def evaluate() -> Any:
            loss = closure()
            begins()
            return loss

        if args:
            return step(self, evaluate, *args[1:], **kwargs)
        return step(self, **{**kwargs, "closure": evaluate})

    setattr(inner, _MARK, True)
    return inner


def _outer(step: Callable[..., Any], watch: Any, probe: Probe) -> Callable[..., Any]:
    begin, end = probe.guard(watch.begin), probe.guard(watch.end)

    @functools.wraps(step)
    def outer(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(self, *args, **kwargs)
        outermost = begin(self, closure=bool(args) or kwargs.get("closure") is not None)
        succeeded = False
        try:
            result = step(self, *args, **kwargs)
            succeeded = True
            if outermost:
                end(self)
        finally:
            if outermost:
                watch.leave(self, succeeded=succeeded)
        return result

    return outer


def wrap_clipping(watch: Any, probe: Probe) -> None:
    """Tell ``watch`` of torch's functions that clip gradients."""
    module = importlib.import_module("torch.nn.utils.clip_grad")
    inside = [False]  # clip_grad_norm calls clip_grad_norm_
    kinds = {
        "clip_grad_norm_": "norm",
        "clip_grad_norm": "norm",
        "clip_grads_with_norm_": "norm",
        "clip_grad_value_": "value",
    }
    for name, kind in kinds.items():
        original = getattr(module, name, None)
        if original is None:
            continue
        wrapped = _clip(original, name, kind, watch, probe, inside)
        for place in (module, torch.nn.utils):
            if getattr(place, name, None) is original:
                setattr(place, name, wrapped)


def _clip(
    original: Callable[..., Any], name: str, kind: str, watch: Any, probe: Probe, inside: list[bool]
) -> Callable[..., Any]:
    clipped = probe.guard(watch.clipped)

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        inside[0] = True
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            inside[0] = False
        named = kwargs.get("max_norm", kwargs.get("clip_value"))
        given = kwargs.get("total_norm", args[1] if len(args) > 1 else None)
        norm = given if name == "clip_grads_with_norm_" else result
        clipped(kind, tensors, args[0] if args else named, norm)
        return result

    return clip


def wrap_scaler(watch: Any, probe: Probe) -> None:
    """Tell ``watch`` by what GradScaler has multiplied the loss of a step."""
    scaler = getattr(importlib.import_module("torch.amp"), "GradScaler", None)
    if scaler is None:
        return
    original = scaler.step

    @probe.guard
    def note(self: Any) -> None:
        scale = getattr(self, "_scale", None)
        if scale is not None and getattr(self, "_enabled", True):
            watch.scale = float(scale)

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return original(self, *args, **kwargs)

    scaler.step = step
