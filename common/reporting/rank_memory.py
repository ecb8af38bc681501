"""Count the bytes of tensors that a rank holds, by kind: ``rank_memory``.

Call it after a step and before the next ``zero_grad``: then gradients and optimiser state both
exist. memory_model.py (common/cost_model) predicts the same numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.cost_model.memory_model import Memory
from common.sync.base import GradientSync

T = TypeVar("T")

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
    # ddp_zero1 has a second optimiser.
    optimizers = [vars(one) for one in [optimizer, *found_within(vars(sync), Optimizer)]]
    return {
        "parameters": new_bytes(p for p in parameters if p.requires_grad),
        "untrained": new_bytes([*parameters, *model.buffers()]),
        "gradients": new_bytes(p.grad for p in [*parameters, *stepped]) + _hidden_bytes(model),
        "optimizer_state": new_bytes(found_within(optimizers, Tensor)),
        "buckets": new_bytes(found_within(vars(sync), Tensor)),
    }


def _hidden_bytes(model: nn.Module) -> int:
    """Return the bytes of DDP's buckets that no ``p.grad`` views: Python does not see them."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)


def found_within(value: Any, kind: type[T], seen: set[int] | None = None) -> Iterator[T]:
    """Yield every ``kind`` in containers and attributes of ``value``, however deep.

    Does not search modules. ``seen`` : ids of objects that were searched already.
    """
    seen = set() if seen is None else seen
    if isinstance(value, kind):
        yield value
    elif not isinstance(value, _NOT_SEARCHED) and id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from found_within(part, kind, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        return
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        for slot in getattr(type(value), "__slots__", ()):
            yield getattr(value, slot, None)
