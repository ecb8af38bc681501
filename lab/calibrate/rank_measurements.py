"""What one rank measures for a calibration: messages, memory, compute. ``measure_rank`` measures all of it.

Everything is measured in turns, as often as the plan says, so that a machine that drifts distorts all alike. Sizes are in
bytes, times in seconds.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.profiling.link_measurements import (
    FLOAT_BYTES,
    MEMORY_SIZES,
    SPREAD,
    barrier,
    message_call,
    parts_of,
    seconds_of_call,
    time_memory,
)
from common.sync.message_cost import KINDS
from common.utils.environment import environment
from common.utils.system import tune_malloc, usable_cores
from lab.calibrate.trainer import Trainer, cpu_seconds, since

_WARM_UP_ROUNDS = 1
_OVERLAP_BYTES = 8_000_000
_PROBE_SAMPLES, _LONGEST_BACKWARD_SECONDS = 4, 6.0


@dataclass(frozen=True)
class Measures:
    """What to measure.

    Parameters
    ----------
    model, image : name of the model, and (height, width) of the images that it trains on.
    sizes : of messages in bytes, each with the number of calls in a row that are timed together.
    rounds, step_rounds : how often the messages and the training steps are gone through.
    samples : of a training step where a rank has its machine alone; of ranks that share one each has its share. Fewer where
        the model is slow.
    steps : that are timed in each round for each number of samples.
    limit_seconds : after which a rank ends its process.
    """

    model: str
    image: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]
    rounds: int
    step_rounds: int
    samples: tuple[int, ...]
    steps: int
    limit_seconds: float


def measure_rank(rank: int, size: int, *, measures: Measures, ranks_here: int) -> dict[str, Any]:
    """Measure in the open process group; return the numbers of all ranks, on every rank. Collective.

    ranks_here : ranks that share this machine; where there are several, rank 0 also computes alone, with all threads.
    """
    watchdog = threading.Timer(measures.limit_seconds, os._exit, args=[1])
    watchdog.daemon = True
    watchdog.start()
    tune_malloc()
    cores = usable_cores()
    threads = max(1, cores // ranks_here)
    torch.set_num_threads(threads)
    with torch.no_grad():
        found: dict[str, Any] = {"turns": time_messages(rank, size, measures)}
    trainer = Trainer(measures.model, measures.image, most_samples=max(measures.samples))
    samples = _affordable(trainer, measures.samples, ranks_here)
    mine = tuple(max(2, count // ranks_here) for count in samples)
    found |= {"ready": trainer.time_gradients(mine[-1]), "together": [], "overlap": [], "alone": []}
    for _ in range(measures.step_rounds):
        found["together"] += trainer.time_steps(mine, steps=measures.steps, after_step=barrier)
        found["overlap"].append(_overlap(trainer, mine[-1]))
        if ranks_here > 1:
            found["alone"] += _alone(trainer, rank, cores, samples, steps=measures.steps)
            torch.set_num_threads(threads)
    found |= {"threads": threads, "environment": environment()}
    all_ranks = gather_objects(World(rank=rank, size=size), found)
    watchdog.cancel()
    return {
        "ranks": all_ranks,
        "gradients": trainer.gradients,
        "cores": cores,
        "ranks_here": ranks_here,
    }


def time_messages(rank: int, size: int, measures: Measures) -> list[dict[str, Any]]:
    """Return for each round "messages": of each kind [bytes, seconds, seconds without it] of each size, from a common beginning
    until every rank has what it is to have; "memory", as of ``time_memory``; and "cpu", what it cost.

    A tiny all_reduce follows each call, since a sender alone would be timed until it has filled a buffer; the last entry is
    what that takes by itself, measured in the same turn. Each call takes another part of the memory, as gradients lie.
    """
    arena = torch.zeros(
        max(2 * measures.sizes[-1][0], 10 * MEMORY_SIZES[-1]) // FLOAT_BYTES + SPREAD
    ).fill_(0.0)
    calls, rounds = {kind: message_call(kind, rank, size) for kind in KINDS}, []
    for _ in range(_WARM_UP_ROUNDS + measures.rounds):
        began = cpu_seconds()
        found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
        for nbytes, repeats in measures.sizes:
            parts = parts_of(arena, nbytes, repeats)
            nothing = seconds_of_call(lambda _: None, parts)
            for kind, call in calls.items():
                found[kind].append([nbytes, seconds_of_call(call, parts), nothing])
        rounds.append({"messages": found, "memory": time_memory(arena), "cpu": since(began)})
    return rounds[_WARM_UP_ROUNDS:]


def _overlap(trainer: Trainer, samples: int) -> dict[str, Any]:
    """Return the seconds of backward alone, of messages alone, of backward while these messages are under way, and the cost."""
    start = cpu_seconds()
    barrier()
    alone = trainer.backward_seconds(samples)
    one = seconds_of_call(
        lambda tensor: _send(1, tensor)(), [torch.zeros(_OVERLAP_BYTES // FLOAT_BYTES)] * 4
    )
    counts = torch.tensor(
        [max(1.0, 0.5 * alone / one)]
    )  # within backward all of them, and enough to be seen
    dist.all_reduce(counts, op=dist.ReduceOp.MIN)
    tensor, count = torch.zeros(_OVERLAP_BYTES // FLOAT_BYTES), int(counts)
    messages = seconds_of_call(lambda tensor: _send(count, tensor)(), [tensor])
    wait: list[Callable[[], None]] = []
    both = trainer.backward_seconds(samples, before=lambda: wait.append(_send(count, tensor)))
    wait[0]()
    return {"backward": alone, "messages": messages, "both": both, "cpu": since(start)}


def _send(count: int, tensor: Tensor) -> Callable[[], None]:
    """Start ``count`` messages, one after the other as each takes both cores' time; return a function that waits for them."""
    works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(count)]

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def _affordable(trainer: Trainer, samples: Sequence[int], ranks_here: int) -> tuple[int, ...]:
    """Return ``samples``, fewer where a step of a rank's share of the largest would take too long. Collective."""
    barrier()
    trainer.backward_seconds(_PROBE_SAMPLES)
    seconds = trainer.backward_seconds(_PROBE_SAMPLES) / _PROBE_SAMPLES * max(samples) / ranks_here
    share = torch.tensor([min(1.0, _LONGEST_BACKWARD_SECONDS / seconds)])
    dist.all_reduce(share, op=dist.ReduceOp.MIN)
    return tuple(
        max(2 * position * ranks_here, int(count * float(share)))
        for position, count in enumerate(sorted(samples), start=1)
    )


def _alone(
    trainer: Trainer, rank: int, cores: int, samples: Sequence[int], *, steps: int
) -> list[dict[str, Any]]:
    """Time rank 0's steps with all of the machine's threads while the other ranks wait for it, step by step."""
    if rank == 0:
        torch.set_num_threads(cores)
        return trainer.time_steps(samples, steps=steps, after_step=barrier)
    for _ in range(trainer.number_of_steps(len(samples), steps=steps)):
        barrier()
    return []
