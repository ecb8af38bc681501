"""What a collective sends: a gradient, weights, or something else.

A tensor is a parameter's gradient if both are views of the same memory.
"""

import functools
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .state import Probe


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return what identifies the memory that a tensor is a view of; None if nothing does."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


class ParameterStorages:
    """Knows the storages of all parameters and of their gradients, to tell what is sent.

    They are collected anew after each backward; before the first one, when models are still being
    built and moved, at every call.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._backwards = 0
        self._collected: tuple[int, int, int] | None = None
        self._gradients: set[int] = set()
        self._weights: set[int] = set()
        probe.hear("backward_end", self._count)
        hooks = torch.nn.modules.module
        if hasattr(hooks, "register_module_parameter_registration_hook"):
            hooks.register_module_parameter_registration_hook(self._add)
        self._watch_optimizers()

    def content_of(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return "gradient", "weights" or "other" for the tensors of a call."""
        key = (os.getpid(), self._backwards, self._probe.step)
        if key != self._collected or not self._backwards:
            self._collect()
            self._collected = key
        storages = {storage_of(one) for one in tensors} - {None}
        if storages & self._gradients:
            return "gradient"
        return "weights" if storages & self._weights else "other"

    def _collect(self) -> None:
        found = [(key, one()) for key, one in self._parameters.items()]
        self._parameters = {key: self._parameters[key] for key, one in found if one is not None}
        alive = [one for _, one in found if one is not None]
        gradients = [one.grad for one in alive if one.is_leaf and one.grad is not None]
        self._weights = {key for one in alive if (key := storage_of(one)) is not None}
        self._gradients = {key for one in gradients if (key := storage_of(one)) is not None}

    def _add(self, module: Any, name: str, parameter: Any) -> None:
        if isinstance(parameter, torch.Tensor):
            self._parameters[id(parameter)] = weakref.ref(parameter)

    def _count(self) -> None:
        self._backwards += 1

    def _watch_optimizers(self) -> None:
        """Add the parameters of optimisers: they need not belong to a module."""
        original = torch.optim.Optimizer.add_param_group

        @functools.wraps(original)
        def add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
            original(optimizer, group)
            for one in optimizer.param_groups[-1]["params"]:
                self._add(None, "", one)

        setattr(torch.optim.Optimizer, "add_param_group", add_param_group)  # noqa: B010 - as above
