"""Time messages and memory in the open process group: the calls that strategies make.

All ranks begin and end each measurement together.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from common.sync.p2p import send_and_receive

FLOAT_BYTES = 4
SPREAD = 7936  # floats between two messages; a multiple of 64 keeps each aligned like a tensor
MEMORY_SIZES = (1_000_000, 4_000_000, 12_000_000)
_MEMORY_PAIRS = 4


def message_call(kind: str, rank: int, size: int) -> Callable[[Tensor], object]:
    """Return the blocking call of that kind as a strategy makes it; it takes one tensor."""

    def buffers(tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(size)]

    def whole_parts(tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // size * size]

    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda tensor: dist.all_reduce(tensor),
        "reduce": lambda tensor: dist.reduce(tensor, dst=0),
        "broadcast": lambda tensor: dist.broadcast(tensor, src=0),
        "gather": lambda tensor: dist.gather(tensor, buffers(tensor) if rank == 0 else None, dst=0),
        "scatter": lambda tensor: dist.scatter(
            torch.empty_like(tensor), [tensor] * size if rank == 0 else None, src=0
        ),
        "all_gather": lambda tensor: dist.all_gather(buffers(tensor), tensor),
        "all_to_all": lambda tensor: dist.all_to_all_single(
            torch.empty_like(whole_parts(tensor)), whole_parts(tensor)
        ),
        "reduce_scatter": lambda tensor: dist.reduce_scatter_tensor(
            tensor.new_empty(len(tensor) // size), whole_parts(tensor)
        ),
        "exchange": lambda tensor: send_and_receive(
            tensor, torch.empty_like(tensor), to=(rank + 1) % size, source=(rank - 1) % size
        ),
    }
    return calls[kind]


def parts_of(arena: Tensor, nbytes: int, repeats: int) -> list[Tensor]:
    """Return ``repeats`` parts of ``arena`` of ``nbytes`` each, spread like gradients in memory."""
    count = max(1, nbytes // FLOAT_BYTES)
    offsets = range(0, repeats * (count + SPREAD), count + SPREAD)
    return [arena[offset % (len(arena) - count) :][:count] for offset in offsets]


def seconds_of_call(call: Callable[[Tensor], object], parts: list[Tensor]) -> float:
    """Return the mean seconds of one call and the barrier after it, over ``parts``.

    Collective, like all functions below.
    """
    barrier()
    began = time.perf_counter()
    for part in parts:
        call(part)
        barrier()
    return (time.perf_counter() - began) / len(parts)


def barrier(_step: int = 0) -> None:
    """Wait for all ranks with a tiny all_reduce.

    Its argument lets it serve as the trainer's ``after_step``.
    """
    dist.all_reduce(torch.zeros(2))


def over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    """Return the largest (MAX) or smallest (MIN) of all ranks' values. Collective."""
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, op=op)
    return float(number)


def time_memory(arena: Tensor) -> dict[str, list[list[float]]]:
    """Return rows [bytes, seconds] of "sum" and "copy", all ranks at once.

    "sum" adds one part of ``arena`` to another, "copy" copies it.
    """
    actions: dict[str, Callable[[Tensor, Tensor], object]] = {
        "sum": Tensor.add_,
        "copy": Tensor.copy_,
    }
    return {
        name: [[nbytes, _seconds_in_memory(act, arena, nbytes)] for nbytes in MEMORY_SIZES]
        for name, act in actions.items()
    }


def _seconds_in_memory(
    act: Callable[[Tensor, Tensor], object], arena: Tensor, nbytes: int
) -> float:
    parts = parts_of(arena, nbytes, 2 * _MEMORY_PAIRS)
    barrier()
    began = time.perf_counter()
    for part, other in zip(parts[::2], parts[1::2], strict=True):
        act(part, other)
    return (time.perf_counter() - began) / _MEMORY_PAIRS
