"""What one rank measures for a calibration: ``measure_rank`` times messages, memory and compute.

Everything is measured in turns, for several rounds, so that a machine whose speed drifts distorts
all numbers alike. Sizes are in bytes, times in seconds.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from common.distributed.collectives import gather_objects
from common.distributed.process_group import current_world
from common.sync.message_cost import KINDS
from common.utils.environment import environment
from common.utils.progress import show_progress
from common.utils.system import tune_malloc, usable_cores
from lab.calibrate.link_measurements import (
    FLOAT_BYTES,
    MEMORY_SIZES,
    SPREAD,
    barrier,
    message_call,
    over_ranks,
    parts_of,
    seconds_of_call,
    time_memory,
)
from lab.calibrate.trainer import WARM_UP_STEPS, Trainer, cpu_seconds, spent

_LIMIT_SECONDS = 600
_WARM_UP_ROUNDS = 1
_OVERLAP_BYTES = 8_000_000
_PROBE_SAMPLES, _LONGEST_BACKWARD_SECONDS = 4, 6.0


@dataclass(frozen=True)
class Measures:
    """What to measure.

    Parameters
    ----------
    model : by name, see common/models.
    sizes : of messages in bytes, each with the number of calls in a row that are timed together.
    rounds, step_rounds : rounds of the messages and of the training steps.
    samples : of the training steps of a rank that has its machine to itself; ranks that share a
        machine divide them. Fewer are used if the model is slow.
    steps : timed in each round for each number of samples.
    """

    model: str
    sizes: tuple[tuple[int, int], ...]
    rounds: int
    step_rounds: int
    samples: tuple[int, ...]
    steps: int

    @property
    def number(self) -> int:
        """The number of measurements, for the progress."""
        return _WARM_UP_ROUNDS + self.rounds + self.step_rounds


Row = list[int | float]
# Seconds by name, with the CPU times under "cpu" and perhaps a number of "samples".
Times = dict[str, int | float | dict[str, float]]


class MessageRound(TypedDict):
    """A round of messages; rows are those of ``time_messages`` and ``time_memory``."""

    messages: dict[str, list[Row]]
    memory: dict[str, list[Row]]
    cpu: dict[str, float]


class RankMeasurements(TypedDict):
    """What one rank measured; times in seconds.

    ready : see ``Trainer.time_gradients``. overlap : see ``_overlap``.
    together, alone : steps, see ``Trainer.time_steps``; rank 0 alone computes "alone".
    environment : as in a run's ``environment.json``.
    """

    turns: list[MessageRound]
    ready: list[float]
    together: list[Times]
    overlap: list[Times]
    alone: list[Times]
    threads: int
    environment: dict[str, Any]


def measure_rank(rank: int, size: int, *, measures: Measures, ranks_here: int) -> dict[str, Any]:
    """Measure in the open process group; return all ranks' numbers on every rank. Collective.

    ranks_here : ranks that share this machine; if there are several, rank 0 also computes alone,
        with all threads. The process is killed (SIGALRM) if it takes longer than ten minutes.
    """
    # On a busy machine a rank may wait longer for rank 0, which measures alone, than for a message.
    newer = hasattr(dist, "set_timeout")  # some of the torch versions that pyproject.toml admits
    set_timeout = dist.set_timeout if newer else distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=_LIMIT_SECONDS))
    tune_malloc()
    cores = usable_cores()
    threads = max(1, cores // ranks_here)
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        signal.alarm(_LIMIT_SECONDS)
        stack.callback(signal.alarm, 0)
        show = stack.enter_context(
            show_progress(
                "calibration", total=measures.number, unit="measurements", visible=rank == 0
            )
        )
        with torch.no_grad():
            turns = time_messages(rank, size, measures, show)
        trainer = Trainer(measures.model, most_samples=max(measures.samples))
        samples = _affordable(trainer, measures.samples, ranks_here)
        mine = tuple(max(2, count // ranks_here) for count in samples)
        found: RankMeasurements = {
            "turns": turns,
            "ready": trainer.time_gradients(mine[-1]),
            "together": [],
            "overlap": [],
            "alone": [],
            "threads": threads,
            "environment": environment(),
        }
        for done in range(measures.number - measures.step_rounds, measures.number):
            show(done)
            found["together"] += trainer.time_steps(mine, steps=measures.steps, after_step=barrier)
            found["overlap"].append(_overlap(trainer, mine[-1]))
            if ranks_here > 1:
                found["alone"] += _alone(trainer, rank, cores, samples, steps=measures.steps)
                torch.set_num_threads(threads)
    return {
        "ranks": gather_objects(current_world(), found, schema=RankMeasurements),
        "gradients": trainer.gradients,
        "cores": cores,
        "ranks_here": ranks_here,
    }


def time_messages(
    rank: int, size: int, measures: Measures, show: Callable[[int], None]
) -> list[MessageRound]:
    """Return "messages", "memory" and "cpu" for each round. Collective.

    "messages" has rows [bytes, seconds, seconds without the message] for each kind, from a common
    begin until every rank has its result; "memory" is what ``time_memory`` returns, "cpu" the CPU
    time of the round. A tiny all_reduce follows each message, since a send timed alone would seem
    to end as soon as the message is in a buffer. A row's last entry is the time of that all_reduce
    alone, measured in the same round. Each call uses another part of memory, as gradients do.
    """
    floats = max(2 * measures.sizes[-1][0], 10 * MEMORY_SIZES[-1]) // FLOAT_BYTES + SPREAD
    arena = torch.zeros(floats).fill_(0.0)  # filled: the kernel maps its pages now
    calls = {kind: message_call(kind, rank, size) for kind in KINDS}
    rounds: list[MessageRound] = []
    for done in range(_WARM_UP_ROUNDS + measures.rounds):
        show(done)
        began = cpu_seconds()
        found: dict[str, list[Row]] = {kind: [] for kind in KINDS}
        for nbytes, repeats in measures.sizes:
            parts = parts_of(arena, nbytes, repeats)
            without = seconds_of_call(lambda _: None, parts)
            for kind, call in calls.items():
                found[kind].append([nbytes, seconds_of_call(call, parts), without])
        rounds.append(
            {  # in this order: the CPU time covers the rest
                "messages": found,
                "memory": time_memory(arena),
                "cpu": spent(began, cpu_seconds()),
            }
        )
    return rounds[_WARM_UP_ROUNDS:]


def _overlap(trainer: Trainer, samples: int) -> dict[str, Any]:
    """Return the seconds of backward alone, of messages alone, and of backward during messages."""
    start = cpu_seconds()
    barrier()
    alone = trainer.backward_seconds(samples)
    tensor = torch.zeros(_OVERLAP_BYTES // FLOAT_BYTES)
    one = seconds_of_call(lambda part: _wait(_send(1, part)), [tensor] * 4)
    # Messages for half of backward: all of them end within it, and they suffice to show their cost.
    count = int(over_ranks(max(1.0, 0.5 * alone / one), dist.ReduceOp.MIN))
    messages = seconds_of_call(lambda part: _wait(_send(count, part)), [tensor])
    works: list[dist.Work] = []
    both = trainer.backward_seconds(samples, before=lambda: works.extend(_send(count, tensor)))
    _wait(works)
    return {
        "backward": alone,
        "messages": messages,
        "both": both,
        "cpu": spent(start, cpu_seconds()),
    }


def _send(count: int, tensor: Tensor) -> list[dist.Work]:
    """Start ``count`` messages, one after the other."""
    return [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(count)]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _affordable(trainer: Trainer, samples: Sequence[int], ranks_here: int) -> tuple[int, ...]:
    """Return ``samples``, fewer if a rank's share of the largest would take too long.

    Collective.
    """
    barrier()
    trainer.backward_seconds(_PROBE_SAMPLES)
    seconds = trainer.backward_seconds(_PROBE_SAMPLES) / _PROBE_SAMPLES * max(samples) / ranks_here
    share = over_ranks(min(1.0, _LONGEST_BACKWARD_SECONDS / seconds), dist.ReduceOp.MIN)
    return tuple(
        max(2 * position * ranks_here, int(count * share))
        for position, count in enumerate(sorted(samples), start=1)
    )


def _alone(
    trainer: Trainer, rank: int, cores: int, samples: Sequence[int], *, steps: int
) -> list[dict[str, Any]]:
    """Time rank 0's steps with all threads of the machine while the other ranks wait."""
    if rank == 0:
        torch.set_num_threads(cores)
        return trainer.time_steps(samples, steps=steps, after_step=barrier)
    for _ in range(len(samples) * (WARM_UP_STEPS + steps)):
        barrier()
    return []
