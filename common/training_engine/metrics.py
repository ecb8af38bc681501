"""The numbers of steps and epochs: their records, and the buffer that turns a rank's numbers into the group's.

Call ``MetricsBuffer.add`` after every step, and ``flush`` where it is ``due``: one small all_reduce for all steps since the
last one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.errors import GroupError
from common.profiling.step_timer import StepTimer

_FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class StepRecord:
    """One step: ``loss`` and ``accuracy`` over the global batch, ``local_loss`` over this rank's share, seconds by
    section, the learning rate it used. ``wait_seconds`` is the part of "sync" in which the slowest rank still computed; the
    rest is the wire. Steps count from 1 over the whole training. Losses and accuracy are NaN where compute was emulated."""

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
    """What this rank did in one epoch: ``samples``, their summed loss, how many it predicted right, the seconds of each
    step and of the whole epoch; ``complete`` is False where a request to stop ended it."""

    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True

    def add(self, *, loss_sum: float, correct: float, samples: int, step_seconds: float) -> None:
        """Count one step."""
        self.samples += samples
        self.loss_sum += loss_sum
        self.correct += correct
        self.step_seconds.append(step_seconds)

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
        """Mean over the steps but the first, which warms up."""
        warm = self.step_seconds[1:] or self.step_seconds
        return sum(warm) / len(warm) if warm else math.nan


@dataclass(frozen=True)
class EpochReport:
    """One epoch over all ranks: losses are means over samples, accuracies from 0 to 1, ``samples_per_second`` those of
    training over all ranks, ``ema_*`` of the averaged weights. NaN where there was no validation or no average, and all of
    them where compute was emulated."""

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
        """The one that chooses the best epoch and reaches the target: of the averaged weights where they are kept."""
        return self.val_accuracy if math.isnan(self.ema_val_accuracy) else self.ema_val_accuracy

    def line(self) -> str:
        """The numbers for a person."""
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
    """A step's numbers, which may still be on the GPU: mean loss over this rank's samples, right predictions, norm of
    the synchronised gradients; ``trained`` False where compute was emulated, so that loss and predictions are NaN."""

    loss: Tensor
    correct: Tensor
    gradient_norm: Tensor
    trained: bool = True

    @classmethod
    def of_no_training(cls) -> "StepOutcome":
        """Return the outcome of a step that computed nothing."""
        return cls(torch.tensor(math.nan), torch.tensor(math.nan), torch.zeros(()), trained=False)


@dataclass(frozen=True)
class _Pending:
    step: int
    outcome: StepOutcome
    samples: int
    learning_rate: float
    times: dict[str, list[tuple]]


class MetricsBuffer:
    """The steps of one epoch, first as this rank's own numbers, then as the group's.

    Parameters
    ----------
    log_every : most steps between two flushes; slow steps are flushed sooner, about every two seconds, so that a request
        to stop is soon agreed on.
    overflow_is_normal : gradients that are not finite are no error, since a GradScaler skips such steps.
    equal_gradients : all ranks hold the same gradients after the exchange.
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
        self._on_steps = on_steps
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
        times: dict[str, list[tuple]],
    ) -> None:
        """Keep a step that was just done, with what ``StepTimer.take`` returned after it."""
        self._pending.append(_Pending(step, outcome, samples, learning_rate, times))

    @property
    def due(self) -> bool:
        """Whether to flush now; the same on every rank."""
        # Where all ranks hold the same gradients, all of them see here that they are not finite.
        sees_alike = self._equal_gradients and self._world.device.type == "cpu"
        return (
            len(self._pending) >= self._interval
            or self._pending[-1].step % self._log_every == 0
            or (sees_alike and not math.isfinite(float(self._pending[-1].outcome.gradient_norm)))
        )

    def flush(self, *, stop: bool) -> bool:
        """Record the steps since the last flush and return whether any rank asks to ``stop``; collective.

        Raises GroupError on every rank where loss or gradients are not finite on one.
        """
        # A row a step: loss sum, right predictions, samples, not finite; and one of requests to stop and seconds.
        table = torch.zeros(len(self._pending) + 1, 4, dtype=torch.float64)
        seconds = [sum(self._timer.seconds(step.times).values()) for step in self._pending]
        for row, step in zip(table, self._pending, strict=False):
            loss, correct = float(step.outcome.loss), float(step.outcome.correct)
            bad_loss = step.outcome.trained and not math.isfinite(loss)
            bad_norm = not math.isfinite(float(step.outcome.gradient_norm))
            bad = bad_loss or (bad_norm and not self._overflow_is_normal)
            loss_sum = loss * step.samples if step.samples else 0.0
            row[:] = torch.tensor([loss_sum, correct, step.samples, bad], dtype=torch.float64)
        table[-1, 0], table[-1, 1] = float(stop), sum(seconds)
        mine = table.tolist()
        total = table.to(self._world.device)
        if self._world.size > 1:
            dist.all_reduce(total)
        rows = total.tolist()
        waits = self._wait_seconds()
        good = [step for step, row in zip(self._pending, rows, strict=False) if row[3] == 0]
        for step, own, own_seconds in zip(good, mine, seconds, strict=False):
            self.result.add(
                loss_sum=own[0], correct=own[1], samples=step.samples, step_seconds=own_seconds
            )
        if self._on_steps is not None and good:
            self._on_steps(
                [
                    self._record(step, loss=row[0] / row[2], accuracy=row[1] / row[2], wait=wait)
                    for step, row, wait in zip(good, rows, waits, strict=False)
                ]
            )
        bad_steps = self._pending[len(good) :]
        if self._pending:
            mean_seconds = rows[-1][1] / self._world.size / len(self._pending)
            steps = int(_FLUSH_SECONDS / max(mean_seconds, 1e-6))
            self._interval = max(1, min(self._log_every, steps))
        self._pending = []
        if bad_steps:
            self._raise_not_finite(bad_steps[0])
        return rows[-1][0] > 0

    def _wait_seconds(self) -> list[float]:
        """Return how long each pending step's "sync" waited for the slowest rank: until that rank began it, too. Collective."""
        if self._world.size == 1:
            return [0.0] * len(self._pending)
        parts = [self._timer.spans(step.times)["sync"] for step in self._pending]
        begins = torch.full((len(parts), 2), -math.inf, dtype=torch.float64)
        for row, spans in zip(begins, parts, strict=True):
            row[: len(spans)] = torch.tensor(
                [begin - self._clock_offset for begin, _ in spans], dtype=torch.float64
            )
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
        if self._on_steps is not None and self._pending:
            self._on_steps(
                [self._record(step, loss=math.nan, accuracy=math.nan) for step in self._pending]
            )

    def _record(
        self, step: _Pending, *, loss: float, accuracy: float, wait: float = 0.0
    ) -> StepRecord:
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

    def _raise_not_finite(self, step: _Pending) -> None:
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
