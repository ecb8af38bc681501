"""A stand-in for a CUDA graph on the CPU: it replays tensor operations, and no Python.

As on a GPU, recording runs nothing: what it changed is put back. Each replay calls the recorded
operations on the recorded tensors, and writes each result to the memory of the recorded result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func._schema.name not in _WAITS, f"{func} waits for the GPU: it cannot be captured"
        # All of them: BatchNorm's operations do not declare that they change running statistics.
        for tensor in _tensors([args, kwargs]):
            self._before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(result)))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, value in self._before.values():
            tensor.copy_(value)


def record_on_cpu(body: Callable[[], None]) -> Callable[[], None]:
    """As ``record_on_gpu`` of captured_step.py."""
    recorder = _Recorder()
    with torch.random.fork_rng(devices=()), recorder:
        body()
    recorder.undo()

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs, recorded in recorder.calls:
            results = _tensors(func(*args, **kwargs))
            for old, new in zip(recorded, results, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
