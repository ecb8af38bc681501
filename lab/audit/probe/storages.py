"""What a collective sends: a gradient, weights, or something else.

A tensor is a parameter's gradient if both are views of the same memory.
"""

import os
from collections.abc import Iterable

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

    They are collected anew after each backward; within it, and before the first one, when models
    are still being built and moved, at every call.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._collected: tuple[int, int, int] | None = None
        self._gradients: set[int | None] = set()
        self._weights: set[int | None] = set()

    def content_of(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return "gradient", "weights" or "other" for the tensors of a call."""
        backward = self._probe.gradients.backward
        key = (os.getpid(), backward, self._probe.step)
        if key != self._collected or not backward or self._probe.in_backward:
            self._collect()
            self._collected = None if self._probe.in_backward else key
        storages = {storage_of(one) for one in tensors} - {None}
        if storages & self._gradients:
            return "gradient"
        return "weights" if storages & self._weights else "other"

    def _collect(self) -> None:
        known = self._probe.gradients.tensors()
        self._weights = {storage_of(one) for one in known}
        self._gradients = {storage_of(one.grad) for one in known if one.grad is not None}
