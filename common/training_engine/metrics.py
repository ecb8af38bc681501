"""The numbers of steps and epochs, and the buffer that combines them over all ranks.

Call ``MetricsBuffer.add`` after every step, and ``flush`` when it is ``due``. One small all_reduce
then serves all steps since the last flush.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_tensors, start_all_reduce
from common.distributed.process_group import World
from common.errors import GroupError
from common.profiling.step_timer import RawSpans, StepTimer

_FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, counted from 1 over the whole training.

    samples, local_loss : this rank's. loss, accuracy : over the global batch. learning_rate : the
    one that the step used. seconds : by section of the step. step_seconds : of the whole step, with
    what lies between the sections; in a CUDA graph forward, backward and sync are 0, and update is
    only what follows the graph. wait_seconds : the part of "sync" spent waiting for the slowest
    rank to finish computing; the rest is network time. Losses and accuracy are NaN if compute was
    emulated.
    """

    epoch: int
    step: int
    samples: int
    loss: float
    accuracy: float
    local_loss: float
    learning_rate: float
    seconds: dict[str, float]
    step_seconds: float
    wait_seconds: float = 0.0


@dataclass
class EpochResult:
    """What this rank did in one epoch, also before a resume.

    samples : number of training samples. loss_sum, correct : their summed loss, and how many were
    predicted correctly. steps, step_seconds : steps and their time; ``steady_`` leaves out the
    first step of each process, which warms up. seconds : time of the whole epoch.
    complete : False if a request to stop ended the epoch early.
    missing_steps : the epoch's first steps whose numbers are lost, since a checkpoint of an older
    version did not hold them.
    """

    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    steady_steps: int = 0
    steady_seconds: float = 0.0
    seconds: float = 0.0
    complete: bool = True
    missing_steps: int = 0

    @property
    def gap(self) -> str:
        """The words that follow the epoch's line if it covers a part only."""
        if not self.missing_steps:
            return ""
        return f", without its first {self.missing_steps} steps, whose numbers the checkpoint lacks"

    @property
    def loss(self) -> float:
        """Mean loss over this rank's samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction of this rank's samples predicted correctly before each step's update, 0 to 1."""
        return self.correct / self.samples if self.samples else math.nan

    @property
    def mean_step_seconds(self) -> float:
        """Mean time of a step, without those that warm up if there are others."""
        if self.steady_steps:
            return self.steady_seconds / self.steady_steps
        return self.step_seconds / self.steps if self.steps else math.nan


@dataclass(frozen=True)
class StepOutcome:
    """A step's numbers, which may still be on the GPU.

    numbers : float64 tensor of shape (3,): mean loss over this rank's samples, samples predicted
    right, norm of the synchronised gradients. trained : False if compute was emulated; loss and
    samples predicted right are NaN then.
    """

    numbers: Tensor
    trained: bool = True

    @classmethod
    def of(cls, loss: Tensor, correct: Tensor, gradient_norm: Tensor) -> "StepOutcome":
        """Return the outcome of a step; each number has shape ()."""
        return cls(torch.stack([loss.double(), correct.double(), gradient_norm.double()]))

    @classmethod
    def of_no_training(cls) -> "StepOutcome":
        """Return the outcome of a step whose compute was emulated."""
        return cls(torch.tensor([math.nan, math.nan, 0.0], dtype=torch.float64), trained=False)


@dataclass(frozen=True)
class _Pending:
    step: int
    outcome: StepOutcome
    samples: int
    learning_rate: float
    times: RawSpans


def sum_over_ranks(world: World, numbers: list[Any]) -> list[Any]:
    """Return the sum of each number (of a list, or of nested lists) over the ranks. Collective."""
    return start_all_reduce(world, numbers)()


def _nothing_to_finish() -> bool:
    return False


class MetricsBuffer:
    """Collects one epoch's steps on this rank, and combines them over the ranks at each flush.

    Parameters
    ----------
    log_every : largest number of steps between two flushes. Slow steps are flushed about every two
        seconds, so that the ranks soon agree on a request to stop.
    overflow_is_normal : infinite gradients are no error, since a GradScaler skips such steps.
    equal_gradients : all ranks hold the same gradients after ``synchronize``.
    on_steps : takes the records of the flushed steps.

    The attribute ``result`` holds the epoch's sums up to the last flush.
    """

    # How many of the last parts of "sync" begin with a message, and so wait for the slowest rank.
    exchanges = 64

    def __init__(
        self,
        world: World,
        timer: StepTimer,
        *,
        epoch: int,
        log_every: int,
        overflow_is_normal: bool,
        equal_gradients: bool,
        on_steps: Callable[[list[StepRecord]], None] | None,
    ) -> None:
        self._began = time.perf_counter()
        self.result = EpochResult()
        self._world, self._timer, self._epoch, self._log_every = world, timer, epoch, log_every
        self._overflow_is_normal, self._equal_gradients = overflow_is_normal, equal_gradients
        self._on_steps = on_steps or (lambda _records: None)
        self._pending: list[_Pending] = []
        self._sent: list[_Pending] = []  # by a flush that has not recorded them yet
        self._finish: Callable[[], bool] = _nothing_to_finish
        self._interval = 1
        self._clock_offset = clock_offset(world)
        self._warm = False

    def resume(self, result: EpochResult, *, start_step: int) -> None:
        """Add to the sums of the epoch's first ``start_step`` steps, before the first step here."""
        result.missing_steps = start_step - result.steps
        self._began -= result.seconds
        self.result = result

    def add(
        self,
        step: int,
        outcome: StepOutcome,
        *,
        samples: int,
        learning_rate: float,
        times: RawSpans,
    ) -> None:
        """Keep the latest step; ``times`` is what ``StepTimer.take`` returned after it."""
        self._pending.append(_Pending(step, outcome, samples, learning_rate, times))

    @property
    def due(self) -> bool:
        """Whether to flush now; the same on every rank."""
        # Ranks with equal gradients see a non-finite norm in the same step, so they agree without
        # a message. The norm is not read on a GPU, since reading it would block.
        sees_alike = self._equal_gradients and self._world.device.type == "cpu"
        return (
            len(self._pending) >= self._interval
            or self._pending[-1].step % self._log_every == 0
            or (sees_alike and not math.isfinite(float(self._pending[-1].outcome.numbers[2])))
        )

    def flush(self, *, stop: bool, wait: bool = True) -> bool:
        """Record the steps since the last flush; return whether any rank asks to stop. Collective.

        wait : for the other ranks. Otherwise the next flush records these steps and answers.
        Raises GroupError on every rank if the loss or the gradients are not finite on any rank.
        """
        asked = self._finish()
        self._finish = self._exchange(stop)
        return self._finish() or asked if wait else asked

    def _exchange(self, stop: bool) -> Callable[[], bool]:
        """Start the messages of a flush; return the function that waits for them and records."""
        pending, numbers = self._pending, self._read(self._pending)
        self._sent, self._pending = pending, []
        seconds = [self._timer.step_seconds(step.times) for step in pending]
        # (steps + 1, 4): loss sum, correct predictions, samples, 1 if not finite.
        # The last row: stop requests, seconds.
        rows = [
            [
                loss * one.samples if one.samples else 0.0,
                correct,
                one.samples,
                not self._is_finite(one.outcome, loss, norm),
            ]
            for one, (loss, correct, norm) in zip(pending, numbers, strict=True)
        ]
        sums = start_all_reduce(self._world, [*rows, [stop, sum(seconds), 0, 0]])
        waits = self._wait_seconds(pending)

        def finish() -> bool:
            self._finish = _nothing_to_finish
            *totals, (stop_requests, all_seconds, _, _) = sums()
            waited = waits()
            self._sent = []  # only now, so that flush_local has them if a lost rank breaks this
            good = next((i for i, total in enumerate(totals) if total[3]), len(totals))
            for step, (loss_sum, correct, _, _) in zip(pending[:good], rows, strict=False):
                self.result.loss_sum += loss_sum
                self.result.correct += correct
                self.result.samples += step.samples
            self._count_time(seconds[:good])
            if good:
                self._on_steps(
                    [
                        self._record(step, local[0], loss_sum / samples, correct / samples, wait)
                        for step, local, (loss_sum, correct, samples, _), wait in zip(
                            pending[:good], numbers, totals, waited, strict=False
                        )
                    ]
                )
            if good < len(pending):
                self._raise_not_finite(pending[good], numbers[good][0])
            if pending:
                self._timer.anchor()  # the GPU has just answered, so there is nothing to wait for
                mean_seconds = all_seconds / self._world.size / len(pending)
                steps = int(_FLUSH_SECONDS / max(mean_seconds, 1e-6))
                self._interval = max(1, min(self._log_every, steps))
            return stop_requests > 0

        return finish

    @staticmethod
    def _read(pending: Sequence[_Pending]) -> list[list[float]]:
        """Return each step's loss, samples predicted right and gradient norm: one read in all."""
        return torch.stack([step.outcome.numbers for step in pending]).tolist() if pending else []

    def _is_finite(self, outcome: StepOutcome, loss: float, norm: float) -> bool:
        good_loss = math.isfinite(loss) or not outcome.trained
        return good_loss and (self._overflow_is_normal or math.isfinite(norm))

    def _count_time(self, seconds: list[float]) -> None:
        result, steady = self.result, seconds if self._warm else seconds[1:]
        result.steps += len(seconds)
        result.step_seconds += sum(seconds)
        result.steady_steps += len(steady)
        result.steady_seconds += sum(steady)
        result.seconds = time.perf_counter() - self._began
        self._warm = self._warm or bool(seconds)

    def _wait_seconds(self, pending: list[_Pending]) -> Callable[[], list[float]]:
        """Return the function that returns how long each step's "sync" waited for the slowest rank.

        Collective; the function waits for the messages.
        """
        if self._world.size == 1 or not pending:
            return lambda: [0.0] * len(pending)
        count = self.exchanges
        parts = [self._timer.spans(step.times)["sync"][-count:] for step in pending]
        begins = [  # (steps, count) on the ranks' common clock
            [begin - self._clock_offset for begin, _ in spans] + [-math.inf] * (count - len(spans))
            for spans in parts
        ]
        latest = start_all_reduce(self._world, begins, dist.ReduceOp.MAX)
        return lambda: [
            sum(
                min(max(0.0, last + self._clock_offset - begin), end - begin)
                for (begin, end), last in zip(spans, row, strict=False)
            )
            for spans, row in zip(parts, latest(), strict=True)
        ]

    def flush_local(self) -> None:
        """Record the steps before an error, with this rank's numbers only. Not collective."""
        steps = self._sent + self._pending
        if steps:
            losses = [loss for loss, _, _ in self._read(steps)]
            self._on_steps(
                [
                    self._record(step, loss, math.nan, math.nan, 0.0)
                    for step, loss in zip(steps, losses, strict=True)
                ]
            )

    def _record(
        self, step: _Pending, local_loss: float, loss: float, accuracy: float, wait: float
    ) -> StepRecord:
        return StepRecord(
            self._epoch,
            step.step,
            step.samples,
            loss,
            accuracy,
            local_loss,
            step.learning_rate,
            self._timer.seconds(step.times),
            self._timer.step_seconds(step.times),
            wait,
        )

    def _raise_not_finite(self, step: _Pending, local_loss: float) -> NoReturn:
        losses = gather_tensors(
            self._world, {"loss": torch.tensor(local_loss, dtype=torch.float64)}
        )
        culprits = [
            f"loss {loss} on rank {rank}"
            for rank, loss in enumerate(float(one["loss"]) for one in losses)
            if not math.isfinite(loss)
        ]
        what = ", ".join(culprits) if culprits else "the gradients overflowed, the loss is finite"
        raise GroupError(
            f"not finite in epoch {self._epoch}, step {step.step}: {what}. All ranks stop. "
            "Lower --learning-rate, warm up longer, or look for broken inputs"
        )
