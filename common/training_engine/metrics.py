"""The numbers of steps and epochs, and the buffer that turns one rank's numbers into the group's.

Call ``MetricsBuffer.add`` after every step, and ``flush`` when it is ``due``: one small all_reduce
for all steps since the last one.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.errors import GroupError
from common.profiling.step_timer import RawSpans, StepTimer

_FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class StepRecord:
    """One step, counted from 1 over the whole training.

    samples, local_loss : this rank's. loss, accuracy : over the global batch.
    learning_rate : the one that the step used. seconds : by section of the step.
    wait_seconds : the part of "sync" in which the slowest rank still computed; the rest is the
    network. Losses and accuracy are NaN where compute was emulated.
    """

    epoch: int
    step: int
    samples: int
    loss: float
    accuracy: float
    local_loss: float
    learning_rate: float
    seconds: dict[str, float]
    wait_seconds: float = 0.0


@dataclass
class EpochResult:
    """What this rank did in one epoch.

    samples : how many it trained on. loss_sum, correct : their summed loss, and how many it
    predicted right. step_seconds, seconds : of each step, and of the whole epoch. complete : False
    where a request to stop ended the epoch.
    """

    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True

    @property
    def loss(self) -> float:
        """Mean over this rank's samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of this rank's samples predicted right, before each step's update; 0 to 1."""
        return self.correct / self.samples if self.samples else math.nan

    @property
    def mean_step_seconds(self) -> float:
        """Mean over all steps but the first, which warms up."""
        return statistics.fmean(self.step_seconds[1:] or self.step_seconds or [math.nan])


@dataclass(frozen=True)
class EpochReport:
    """One epoch over all ranks.

    Losses are means over samples, accuracies lie between 0 and 1; ``ema_*`` are those of the
    weights' moving average. NaN: no validation, no average, or emulated compute.
    ``samples_per_second`` is the training throughput of all ranks together.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    ema_val_loss: float
    ema_val_accuracy: float
    learning_rate: float
    samples_per_second: float
    seconds: float

    @property
    def deciding_accuracy(self) -> float:
        """The validation accuracy that decides: of the moving average where it is kept."""
        return self.val_accuracy if math.isnan(self.ema_val_accuracy) else self.ema_val_accuracy

    def line(self) -> str:
        """Return the numbers for a person."""
        learned = f"train loss {self.train_loss:.4f}, accuracy {self.train_accuracy:.4f}"
        parts = [f"Epoch {self.epoch}: {'EMULATED' if math.isnan(self.train_loss) else learned}"]
        if not math.isnan(self.val_accuracy):
            parts.append(f"validation loss {self.val_loss:.4f}, accuracy {self.val_accuracy:.4f}")
        if not math.isnan(self.ema_val_accuracy):
            parts.append(
                f"EMA validation loss {self.ema_val_loss:.4f}, accuracy {self.ema_val_accuracy:.4f}"
            )
        parts.append(f"{self.samples_per_second:,.0f} samples/s, {self.seconds:.1f} s")
        return "; ".join(parts)


@dataclass(frozen=True)
class StepOutcome:
    """A step's numbers, which may still be on the GPU.

    loss, correct : mean loss over this rank's samples, and how many it predicted right.
    gradient_norm : of the synchronised gradients. trained : False where compute was emulated, so
    that loss and predictions are NaN.
    """

    loss: Tensor
    correct: Tensor
    gradient_norm: Tensor
    trained: bool = True

    @classmethod
    def of_no_training(cls) -> "StepOutcome":
        """Return the outcome of a step that computed nothing."""
        return cls(torch.tensor(math.nan), torch.tensor(math.nan), torch.zeros(()), trained=False)

    def is_finite(self, *, overflow_is_normal: bool) -> bool:
        """Whether loss and gradients are; a GradScaler skips a step that overflows."""
        good_loss = math.isfinite(float(self.loss)) or not self.trained
        return good_loss and (overflow_is_normal or math.isfinite(float(self.gradient_norm)))


@dataclass(frozen=True)
class _Pending:
    step: int
    outcome: StepOutcome
    samples: int
    learning_rate: float
    times: RawSpans


class MetricsBuffer:
    """The steps of one epoch, first as this rank's own numbers, then as the group's.

    Parameters
    ----------
    log_every : most steps between two flushes. Slow steps are flushed sooner, about every two
        seconds, so that the ranks soon agree on a request to stop.
    overflow_is_normal : infinite gradients are no error, since a GradScaler skips such steps.
    equal_gradients : all ranks hold the same gradients after ``synchronize``.
    """

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
        self._world, self._timer, self._epoch, self._log_every = world, timer, epoch, log_every
        self._overflow_is_normal, self._equal_gradients = overflow_is_normal, equal_gradients
        self._on_steps = on_steps or (lambda _records: None)
        self._pending: list[_Pending] = []
        self._interval = 1
        self._clock_offset = clock_offset(world)
        self.result = EpochResult()

    def add(
        self,
        step: int,
        outcome: StepOutcome,
        *,
        samples: int,
        learning_rate: float,
        times: RawSpans,
    ) -> None:
        """Keep a step that was just done, with what ``StepTimer.take`` returned after it."""
        self._pending.append(_Pending(step, outcome, samples, learning_rate, times))

    @property
    def due(self) -> bool:
        """Whether to flush now; the same on every rank."""
        # Ranks with equal gradients all see here that they are not finite. On a GPU, looking waits.
        sees_alike = self._equal_gradients and self._world.device.type == "cpu"
        return (
            len(self._pending) >= self._interval
            or self._pending[-1].step % self._log_every == 0
            or (sees_alike and not math.isfinite(float(self._pending[-1].outcome.gradient_norm)))
        )

    def flush(self, *, stop: bool) -> bool:
        """Record the steps since the last flush; return whether any rank asks to stop. Collective.

        Raises GroupError on every rank where loss or gradients are not finite on one.
        """
        pending = self._pending
        seconds = [sum(self._timer.seconds(step.times).values()) for step in pending]
        # (steps, 4): loss sum, right predictions, samples, not finite; last row: requests to stop,
        # seconds
        rows = [
            [
                float(one.outcome.loss) * one.samples if one.samples else 0.0,
                float(one.outcome.correct),
                one.samples,
                not one.outcome.is_finite(overflow_is_normal=self._overflow_is_normal),
            ]
            for one in pending
        ]
        table = torch.tensor([*rows, [stop, sum(seconds), 0, 0]], dtype=torch.float64)
        table = table.to(self._world.device)
        if self._world.size > 1:
            dist.all_reduce(table)
        *totals, (stop_requests, all_seconds, _, _) = table.tolist()
        waits = self._wait_seconds(pending)
        self._pending = []  # only now: a rank that is lost breaks the calls above
        records: list[StepRecord] = []
        failed = None
        for one, own, total, own_seconds, wait in zip(
            pending, rows, totals, seconds, waits, strict=True
        ):
            loss_sum, correct, samples, not_finite = total
            if not_finite:
                failed = one
                break
            self.result.loss_sum += own[0]
            self.result.correct += own[1]
            self.result.samples += one.samples
            self.result.step_seconds.append(own_seconds)
            records.append(self._record(one, loss_sum / samples, correct / samples, wait))
        if records:
            self._on_steps(records)
        if failed is not None:
            self._raise_not_finite(failed)
        if pending:
            mean_seconds = all_seconds / self._world.size / len(pending)
            steps = int(_FLUSH_SECONDS / max(mean_seconds, 1e-6))
            self._interval = max(1, min(self._log_every, steps))
        return stop_requests > 0

    def _wait_seconds(self, pending: list[_Pending]) -> list[float]:
        """Return how long each step's "sync" waited for the slowest rank. Collective."""
        if self._world.size == 1:
            return [0.0] * len(pending)
        parts = [self._timer.spans(step.times)["sync"] for step in pending]
        begins = torch.full((len(parts), 2), -math.inf, dtype=torch.float64)  # "sync" has two parts
        for row, spans in zip(begins, parts, strict=True):
            own = [begin - self._clock_offset for begin, _ in spans]
            row[: len(spans)] = torch.tensor(own, dtype=torch.float64)
        latest = begins.to(self._world.device)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        return [
            sum(
                min(max(0.0, last + self._clock_offset - begin), end - begin)
                for (begin, end), last in zip(spans, row, strict=False)
            )
            for spans, row in zip(parts, latest.tolist(), strict=True)
        ]

    def flush_local(self) -> None:
        """Record what was trained before an error, as far as this rank knows it."""
        if self._pending:
            self._on_steps([self._record(step, math.nan, math.nan, 0.0) for step in self._pending])

    def _record(self, step: _Pending, loss: float, accuracy: float, wait: float) -> StepRecord:
        return StepRecord(
            self._epoch,
            step.step,
            step.samples,
            loss,
            accuracy,
            float(step.outcome.loss),
            step.learning_rate,
            self._timer.seconds(step.times),
            wait,
        )

    def _raise_not_finite(self, step: _Pending) -> NoReturn:
        losses = gather_objects(self._world, float(step.outcome.loss))
        culprits = [
            f"loss {loss} on rank {rank}"
            for rank, loss in enumerate(losses)
            if not math.isfinite(loss)
        ]
        what = ", ".join(culprits) if culprits else "gradients overflowed, the loss was finite"
        raise GroupError(
            f"not finite in epoch {self._epoch}, step {step.step}: {what}. All ranks stop; earlier "
            "checkpoints are kept. Lower --learning-rate, warm up longer, or look for broken inputs"
        )
