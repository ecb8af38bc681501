"""Time messages and memory on the open process group: the calls that strategies make, each with a common beginning and end."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from common.sync.p2p import send_and_receive

FLOAT_BYTES = 4
SPREAD = 7936  # between messages, in floats: they keep the alignment that tensors have
MEMORY_SIZES = (1_000_000, 4_000_000, 12_000_000)


def message_call(kind: str, rank: int, size: int) -> Callable[[Tensor], object]:
    """Return the blocking call of that kind as a strategy makes it, of one tensor."""

    def buffers(tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(size)]

    def exchange(tensor: Tensor) -> None:
        send_and_receive(
            tensor, torch.empty_like(tensor), to=(rank + 1) % size, source=(rank - 1) % size
        )

    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda tensor: dist.all_reduce(tensor),
        "reduce": lambda tensor: dist.reduce(tensor, dst=0),
        "broadcast": lambda tensor: dist.broadcast(tensor, src=0),
        "gather": lambda tensor: dist.gather(tensor, buffers(tensor) if rank == 0 else None, dst=0),
        "scatter": lambda tensor: dist.scatter(
            torch.empty_like(tensor), [tensor] * size if rank == 0 else None, src=0
        ),
        "all_gather": lambda tensor: dist.all_gather(buffers(tensor), tensor),
        "exchange": exchange,
    }
    return calls[kind]


def parts_of(arena: Tensor, nbytes: int, repeats: int) -> list[Tensor]:
    """Return ``repeats`` parts of ``arena``, of ``nbytes`` each, at different offsets, as gradients lie in memory."""
    count = max(1, nbytes // FLOAT_BYTES)
    offsets = range(0, repeats * (count + SPREAD), count + SPREAD)
    return [arena[offset % (len(arena) - count) :][:count] for offset in offsets]


def seconds_of_call(call: Callable[[Tensor], object], parts: list[Tensor]) -> float:
    """Return the seconds of one call and the tiny all_reduce after it. Collective."""
    barrier()
    began = time.perf_counter()
    for part in parts:
        call(part)
        barrier()
    return (time.perf_counter() - began) / len(parts)


def barrier(_step: int = 0) -> None:
    """Wait for all ranks: a tiny all_reduce, which may serve as the trainer's ``after_step``."""
    dist.all_reduce(torch.zeros(2))


def time_memory(arena: Tensor) -> dict[str, list[list[float]]]:
    """Return [bytes, seconds] of adding a part of ``arena`` to another ("sum") and of copying it, all ranks at once."""
    found: dict[str, list[list[float]]] = {"sum": [], "copy": []}
    for nbytes in MEMORY_SIZES:
        parts = parts_of(arena, nbytes, 8)
        for name, act in (("sum", Tensor.add_), ("copy", Tensor.copy_)):
            barrier()
            began = time.perf_counter()
            for part, other in zip(parts[::2], parts[1::2], strict=True):
                act(part, other)
            found[name].append([nbytes, (time.perf_counter() - began) / (len(parts) // 2)])
    return found
