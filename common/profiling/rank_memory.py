"""Count the bytes of tensors that a rank holds, by kind: ``rank_memory``.

Call it after a step and before the next ``zero_grad``: then gradients and optimiser state both
exist. A message plan's ``memory`` predicts the same numbers.
"""

import gc
from collections.abc import Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.sync.memory_cost import Memory

# A module's tensors are counted as parameters and buffers.
_NOT_SEARCHED = (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def rank_memory(model: nn.Module, optimizer: Optimizer, sync: GradientSync) -> Memory:
    """Return the bytes of this rank's tensors; of a sharded tensor, those of this rank's part.

    Tensors that share a storage count once, as the first of these kinds: parameters, untrained,
    gradients, optimizer_state, buckets.
    """
    counted: set[tuple[Any, int]] = set()

    def new_bytes(tensors: Iterable[Tensor | None]) -> int:
        found = {}
        for tensor in tensors:
            if tensor is not None:
                storage = _local(tensor).untyped_storage()
                found[storage.device, storage.data_ptr()] = storage.nbytes()
        new = found.keys() - counted
        counted.update(new)
        return sum(found[place] for place in new)

    parameters = list(model.parameters())
    stepped = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {
        "parameters": new_bytes(p for p in parameters if p.requires_grad),
        "untrained": new_bytes([*parameters, *model.buffers()]),
        "gradients": new_bytes(p.grad for p in [*parameters, *stepped]) + _hidden_bytes(model),
        "optimizer_state": new_bytes(_tensors_within(optimizer)),
        "buckets": new_bytes(_tensors_within(sync)),
    }


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor; of a DTensor, this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _hidden_bytes(model: nn.Module) -> int:
    """Return the bytes of DDP's buckets that no ``p.grad`` views: Python does not see them."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield every tensor that ``value`` leads to, through containers and attributes.

    Does not search modules, functions and types.
    """
    seen: set[int] = set()
    to_search = [value]
    while to_search:
        found = to_search.pop()
        if isinstance(found, Tensor):
            yield found
        elif not isinstance(found, _NOT_SEARCHED) and id(found) not in seen:
            seen.add(id(found))
            to_search += gc.get_referents(found)
