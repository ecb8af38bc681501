"""What one rank measures for a calibration: ``measure_rank`` times messages, memory and compute.

Everything is measured in turns, for several rounds, so that a machine whose speed drifts distorts
all numbers alike, and the time of some rounds tells that of the rest. Sizes are in bytes, times in
seconds.
"""

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

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
from lab.calibrate.measurements import (
    GroupMeasurements,
    MessageRound,
    MessageRow,
    OverlapTimes,
    RankMeasurements,
    Sharing,
    StepTimes,
)
from lab.calibrate.trainer import WARM_UP_STEPS, Trainer, cpu_seconds, spent

_LIMIT_SECONDS = 600
_OVERLAP_BYTES = 8_000_000
_PROBE_SAMPLES = 4  # of the backward whose time tells how many samples are affordable
_LONGEST_BACKWARD_SECONDS = 6.0


@dataclass(frozen=True)
class Measures:
    """What to measure.

    Parameters
    ----------
    model : by name, see common/models.
    sizes : of messages in bytes, each with the number of calls in a row that are timed together.
    rounds : each times the messages ``message_turns`` times, and then the training steps.
    samples : of the training steps of a rank that has its machine to itself; ranks that share a
        machine divide them. Fewer are used if the model is slow.
    steps : timed in each round for each number of samples.
    """

    model: str
    sizes: tuple[tuple[int, int], ...]
    rounds: int
    message_turns: int
    samples: tuple[int, ...]
    steps: int


def measure_rank(rank: int, size: int, *, measures: Measures, ranks_here: int) -> GroupMeasurements:
    """Measure in the open process group; return all ranks' numbers on every rank. Collective.

    ranks_here : ranks that share this machine; if there are several, rank 0 also computes alone,
        with all threads. The process is killed (SIGALRM) if it takes longer than ten minutes.
    """
    _set_group_timeout(timedelta(seconds=_LIMIT_SECONDS))
    tune_malloc()
    cores = usable_cores()
    threads = max(1, cores // ranks_here)
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        signal.alarm(_LIMIT_SECONDS)
        stack.callback(signal.alarm, 0)
        messages = MessageTimer(rank, size, measures.sizes)
        messages.time()  # warms up
        trainer = Trainer(measures.model, most_samples=max(measures.samples))
        samples = _affordable(trainer, measures.samples, ranks_here)
        own_samples = tuple(max(2, count // ranks_here) for count in samples)
        found = RankMeasurements(
            turns=[],
            ready=trainer.time_gradients(own_samples[-1]),
            threads=threads,
            environment=environment(),
        )
        progress = show_progress(
            "calibration", total=measures.rounds, unit="rounds", visible=rank == 0
        )
        show = stack.enter_context(progress)
        for done in range(measures.rounds):
            show(done)
            found.turns += [messages.time() for _ in range(measures.message_turns)]
            found.together += trainer.time_steps(
                own_samples, steps=measures.steps, after_step=barrier
            )
            found.overlap.append(_overlap(trainer, own_samples[-1]))
            if ranks_here > 1:
                found.alone += _alone(trainer, rank, cores, samples, steps=measures.steps)
                torch.set_num_threads(threads)
    return GroupMeasurements(
        ranks=gather_objects(current_world(), found, schema=RankMeasurements),
        gradients=trainer.gradients,
        sharing=Sharing(cores, ranks_here),
        batchnorm=trainer.batchnorm,
    )


def _set_group_timeout(timeout: timedelta) -> None:
    """Let a rank wait longer for rank 0, which measures alone, than for a message."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # some of the torch versions that pyproject.toml admits
        distributed_c10d._set_pg_timeout(timeout)


class MessageTimer:
    """Times each kind of message at each size, and memory.

    A row's time is from a common begin until every rank has its result. A tiny all_reduce follows
    each message, since a send timed alone would seem to end as soon as the message is in a buffer;
    that all_reduce alone is timed in the same round. Each call uses another part of memory, as
    gradients do.

    sizes : see ``Measures``.
    """

    def __init__(self, rank: int, size: int, sizes: Sequence[tuple[int, int]]) -> None:
        largest = max(2 * sizes[-1][0], 10 * MEMORY_SIZES[-1])
        self._arena = torch.zeros(largest // FLOAT_BYTES + SPREAD)
        self._arena.fill_(0.0)  # the kernel maps its pages now
        self._calls = {kind: message_call(kind, rank, size) for kind in KINDS}
        self._sizes = sizes

    @torch.no_grad()
    def time(self) -> MessageRound:
        """Return one turn's times. Collective."""
        began = cpu_seconds()
        messages: dict[str, list[MessageRow]] = {kind: [] for kind in KINDS}
        for nbytes, repeats in self._sizes:
            parts = parts_of(self._arena, nbytes, repeats)
            without = seconds_of_call(lambda _: None, parts)
            for kind, call in self._calls.items():
                row = MessageRow(nbytes, seconds_of_call(call, parts), without)
                messages[kind].append(row)
        memory = time_memory(self._arena)
        return MessageRound(messages, memory, cpu=spent(began, cpu_seconds()))


def _overlap(trainer: Trainer, samples: int) -> OverlapTimes:
    """Time backward alone, messages alone, and backward during messages. Collective."""
    began = cpu_seconds()
    barrier()
    alone = trainer.backward_seconds(samples)
    tensor = torch.zeros(_OVERLAP_BYTES // FLOAT_BYTES)
    one_message = seconds_of_call(lambda part: _wait(_send(1, part)), [tensor] * 4)
    # Messages for half of backward: all of them end within it, and they suffice to show their cost.
    fitting = max(1.0, 0.5 * alone / one_message)
    count = int(over_ranks(fitting, dist.ReduceOp.MIN))
    messages = seconds_of_call(lambda part: _wait(_send(count, part)), [tensor])
    works: list[dist.Work] = []  # messages under way
    both = trainer.backward_seconds(samples, before=lambda: works.extend(_send(count, tensor)))
    _wait(works)
    return OverlapTimes(alone, messages, both, cpu=spent(began, cpu_seconds()))


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
    seconds_per_sample = trainer.backward_seconds(_PROBE_SAMPLES) / _PROBE_SAMPLES
    seconds = seconds_per_sample * max(samples) / ranks_here
    share = over_ranks(min(1.0, _LONGEST_BACKWARD_SECONDS / seconds), dist.ReduceOp.MIN)
    # At least two samples a rank, which BatchNorm needs, and numbers that differ, for the line.
    return tuple(
        max(2 * position * ranks_here, int(count * share))
        for position, count in enumerate(sorted(samples), start=1)
    )


def _alone(
    trainer: Trainer, rank: int, cores: int, samples: Sequence[int], *, steps: int
) -> list[StepTimes]:
    """Time rank 0's steps with all threads of the machine while the other ranks wait."""
    if rank == 0:
        torch.set_num_threads(cores)
        return trainer.time_steps(samples, steps=steps, after_step=barrier)
    for _ in range(len(samples) * (WARM_UP_STEPS + steps)):  # one for each of rank 0's steps
        barrier()
    return []
