"""Time messages and memory in the open process group: the calls that strategies make.

All ranks begin and end each measurement together. ``measure_links`` measures all that
lab/predict/measured_links.py makes a network from.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.collectives import all_gather_single
from common.sync.message_cost import KINDS
from common.sync.p2p import send_and_receive
from common.sync.ring import ring_reduce_scatter
from common.utils.processes import DaemonThreads
from lab.calibrate.measurements import MemoryRow
from lab.predict.measured_links import MeasuredLinks

FLOAT_BYTES = 4
SMALL = 1_024  # bytes, as the next two
LARGE = 2_000_000
LARGEST = 8_000_000
_WARM_UP_CALLS = 1
_MEMORY_FLOATS = 24_000_000
# Strategies use these in pairs: a rank sends out what it has collected. A send timed alone would
# seem to end as soon as the message is in a buffer.
_IN_PAIRS = {"gather": "scatter", "scatter": "gather", "reduce": "broadcast", "broadcast": "reduce"}
SPREAD = 7936  # floats between two messages; a multiple of 64 keeps each aligned like a tensor
MEMORY_SIZES = (1_000_000, 4_000_000, 12_000_000)
_MEMORY_PAIRS = 4


class _TimedSize(NamedTuple):
    """A size of messages: ``rounds`` times the mean over ``calls`` in a row is taken."""

    nbytes: int
    calls: int
    rounds: int


_SHAPED_SIZES = [_TimedSize(SMALL, calls=20, rounds=5), _TimedSize(LARGE, calls=2, rounds=3)]
_ALL_SIZES = [*_SHAPED_SIZES, _TimedSize(LARGEST, calls=2, rounds=3)]


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange messages, and their process group; None: the group of all ranks."""

    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None


def message_call(
    kind: str, rank: int, size: int, group: dist.ProcessGroup | None = None, root: int = 0
) -> Callable[[Tensor], object]:
    """Return the blocking call of that kind as a strategy makes it on Gloo; it takes one tensor.

    reduce_scatter sends the tensor's two halves at once, as ``sharded`` sends two buckets.

    group : of ``size`` ranks, with ``root`` as the first; None: all ranks. Collectives alone may
        have one, as far as strategies use them in groups.
    """
    assert group is None or kind in ("all_reduce", "reduce", "broadcast", "gather", "scatter")
    if kind == "reduce_scatter":
        return partial(_two_rings, size=size, threads=DaemonThreads(2))

    def buffers(tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(size)]

    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda tensor: dist.all_reduce(tensor, group=group),
        "reduce": lambda tensor: dist.reduce(tensor, dst=root, group=group),
        "broadcast": lambda tensor: dist.broadcast(tensor, src=root, group=group),
        "gather": lambda tensor: dist.gather(
            tensor, buffers(tensor) if rank == root else None, dst=root, group=group
        ),
        "scatter": lambda tensor: dist.scatter(
            torch.empty_like(tensor),
            [tensor] * size if rank == root else None,
            src=root,
            group=group,
        ),
        "all_gather": lambda tensor: all_gather_single(
            tensor.new_empty(size * len(tensor)), tensor
        ),
        "exchange": lambda tensor: send_and_receive(
            tensor, torch.empty_like(tensor), to=(rank + 1) % size, source=(rank - 1) % size
        ),
    }
    return calls[kind]


def _two_rings(tensor: Tensor, *, size: int, threads: DaemonThreads) -> None:
    """Reduce-scatter both halves of the tensor at once, each in a thread."""
    rings = [
        threads.submit(partial(ring_reduce_scatter, half.tensor_split(size), tag=tag))
        for tag, half in enumerate(tensor.tensor_split(2))
    ]
    for ring in rings:
        ring.result()


def measure_links(
    rank: int,
    size: int,
    *,
    kinds: Sequence[str],
    shaped: bool,
    among: RankGroup | None = None,
) -> MeasuredLinks:
    """Return what messages cost, the same on all ranks. Collective.

    shaped : the links' rate is known, so one large message size is enough. among : the group of
    this rank; all groups measure at the same time, and a rank that is not in its own one waits.
    """
    members = among or RankGroup(range(size))
    size = len(members.ranks)
    takes_part = rank in members.ranks
    sizes = _SHAPED_SIZES if shaped else _ALL_SIZES
    found: dict[str, list[tuple[int, float]]] = {}
    for kind in sorted(kinds, key=KINDS.index):
        twin = _IN_PAIRS.get(kind, "")
        if twin in found:
            found[kind] = found[twin]
        else:
            pair = [
                message_call(name, rank, size, members.group, members.ranks[0])
                for name in (kind, twin)
                if name and takes_part
            ]
            found[kind] = [_time_size(kind, pair, size, timed) for timed in sizes]
    rows = time_memory(torch.zeros(_MEMORY_FLOATS))
    return MeasuredLinks(
        nodes=size,
        kinds=found,
        sum=_seconds_per_byte(rows["sum"]),
        copy=_seconds_per_byte(rows["copy"]),
    )


def _time_size(
    kind: str, pair: Sequence[Callable[[Tensor], object]], ranks: int, timed: _TimedSize
) -> tuple[int, float]:
    """Return the bytes and the median seconds of one message of that kind."""
    nbytes = timed.nbytes
    if kind == "all_gather":  # a buffer of that size: each rank has a part of it
        nbytes //= ranks
    tensor = torch.zeros(nbytes // FLOAT_BYTES)
    taken = [_seconds(pair, tensor, calls=timed.calls) for _ in range(timed.rounds)]
    seconds = statistics.median(taken)
    if kind == "reduce_scatter":  # two rings ran at once: half the bytes, half the time
        return nbytes // 2, seconds / 2
    return nbytes, seconds


def _seconds_per_byte(rows: Sequence[MemoryRow]) -> float:
    """Return the slowest rank's median over the sizes. Collective."""
    own = statistics.median(row.seconds / row.nbytes for row in rows)
    return over_ranks(own, dist.ReduceOp.MAX)


def _seconds(
    calls_in_turn: Sequence[Callable[[Tensor], object]], tensor: Tensor, *, calls: int
) -> float:
    """Return the mean seconds of one call on the slowest rank.

    The first call is not timed: an idle shaped link lets some bytes pass at once.
    """
    over_ranks(0.0, dist.ReduceOp.MAX)
    for number in range(_WARM_UP_CALLS + calls):
        if number == _WARM_UP_CALLS:
            began = time.perf_counter()
        for call in calls_in_turn:
            call(tensor)
    seconds = (time.perf_counter() - began) / calls / max(1, len(calls_in_turn))
    return over_ranks(seconds, dist.ReduceOp.MAX)


def parts_of(arena: Tensor, nbytes: int, repeats: int) -> list[Tensor]:
    """Return ``repeats`` parts of ``arena`` of ``nbytes`` each, spread like gradients in memory.

    At the arena's end they begin again at its front.
    """
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


def time_memory(arena: Tensor) -> dict[str, list[MemoryRow]]:
    """Return rows of "sum" and "copy", all ranks at once.

    "sum" adds one part of ``arena`` to another, "copy" copies it.
    """
    actions: dict[str, Callable[[Tensor, Tensor], object]] = {
        "sum": Tensor.add_,
        "copy": Tensor.copy_,
    }
    return {
        name: [MemoryRow(nbytes, _seconds_in_memory(act, arena, nbytes)) for nbytes in MEMORY_SIZES]
        for name, act in actions.items()
    }


def _seconds_in_memory(
    act: Callable[[Tensor, Tensor], object], arena: Tensor, nbytes: int
) -> float:
    """Return this rank's mean seconds of an action on two parts of ``nbytes`` each."""
    parts = parts_of(arena, nbytes, 2 * _MEMORY_PAIRS)
    over_ranks(0.0, dist.ReduceOp.MAX)
    began = time.perf_counter()
    for part, other in zip(parts[::2], parts[1::2], strict=True):
        act(part, other)
    return (time.perf_counter() - began) / _MEMORY_PAIRS
