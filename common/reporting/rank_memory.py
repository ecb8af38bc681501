"""Count the bytes of tensors that a rank holds, by kind: ``rank_memory``.

Call it after a step and before the next ``zero_grad``: then gradients and optimiser state both
exist. memory_model.py (common/cost_model) predicts the same numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from common.cost_model.memory_model import Memory
from common.sync.base import GradientSync

_CONTAINERS = (list, tuple, set, frozenset)
# A module's tensors are counted as parameters and buffers.
_NOT_SEARCHED = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def rank_memory(model: nn.Module, optimizer: Optimizer, sync: GradientSync) -> Memory:
    """Return the bytes of this rank's tensors; of a sharded tensor, those of this rank's part.

    Tensors that share a storage count once, as the first of these kinds: parameters, untrained,
    gradients, optimizer_state, buckets.
    """
    counted: set[tuple[Any, int]] = set()

    def new_bytes(tensors: Iterable[Tensor | None]) -> int:
        found = 0
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
            storage = local.untyped_storage()
            key = (storage.device, storage.data_ptr())
            if key not in counted:
                counted.add(key)
                found += storage.nbytes()
        return found

    parameters = list(model.parameters())
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": new_bytes(p for p in parameters if p.requires_grad),
        "untrained": new_bytes([*parameters, *model.buffers()]),
        "gradients": new_bytes(p.grad for p in [*parameters, *stepped]),
        "optimizer_state": new_bytes(tensors_within(vars(optimizer), set())),
        "buckets": new_bytes(tensors_within(vars(sync), set())),
    }


def tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor in containers and attributes of ``value``, however deep, except modules'.

    ``seen`` : ids of objects that were searched already.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _NOT_SEARCHED) or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from tensors_within(part, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        for slot in getattr(type(value), "__slots__", ()):
            yield getattr(value, slot, None)
