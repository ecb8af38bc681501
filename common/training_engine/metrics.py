"""The numbers of steps and epochs, and the buffer that combines them over all ranks.

Call ``MetricsBuffer.add`` after every step, and ``flush`` when it is ``due``. One small all_reduce
then serves all steps since the last flush.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch.distributed as dist

from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_objects, start_all_reduce
from common.distributed.process_group import World
from common.errors import GroupError, UserError
from common.profiling.records import StepRecord
from common.profiling.step_timer import RawSpans, StepTimer
from common.training_engine.forward import read, rows_of, summed

_FLUSH_SECONDS = 2.0


@dataclass
class EpochResult:
    """What this rank did in one epoch, also before a resume.

    samples : number of training samples. loss_sum, count : the sum of the losses, and of what they
    are means over, mostly samples. correct : how many samples were predicted correctly; NaN:
    unknown. steps, step_seconds : steps and their time; ``steady_`` leaves out the first step of
    each process, which warms up. seconds : time of the whole epoch.
    complete : False if a request to stop ended the epoch early.
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
    count: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss over this rank's samples, or over what the criterion counts."""
        return self.loss_sum / self.count if self.count else math.nan

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
    """What this rank has of a step until a flush makes it a ``StepRecord``.

    numbers : what ``TrainingEngine.train_step`` returned, perhaps still on the GPU: the
    ``Numbers`` of each micro-batch in one flat list, and at its end the norm of the synchronised
    gradients. times : what ``StepTimer.take`` returned after the step.
    """

    step: int
    numbers: list[Any]
    learning_rate: float
    times: RawSpans


class _StepSums(NamedTuple):
    """What the ranks add up for a step; ``not_finite`` : 1 on a rank whose numbers are not."""

    loss_sum: float
    counted: float
    correct: float
    samples: float
    not_finite: float


def sum_over_ranks(world: World, numbers: list[Any]) -> list[Any]:
    """Return the sum of each number (of a list, or of nested lists) over the ranks. Collective."""
    return start_all_reduce(world, numbers)()


def own_sums(world: World, saved: object) -> EpochResult:
    """Return what this rank has done of the epoch before the resume.

    With another number of ranks, they share out what each saved rank has counted: the sums over the
    ranks stay the same. Raises UserError if ``saved`` is not a list of what ranks have done.
    """
    try:
        ranks = msgspec.convert(saved, list[EpochResult], strict=False)
        own = ranks[world.rank % len(ranks)]
    except (msgspec.ValidationError, ZeroDivisionError) as error:
        raise UserError(f"the checkpoint's epoch_sums cannot be used: {error}") from error
    shared = ranks[world.rank :: world.size]
    return replace(
        own,
        samples=sum(result.samples for result in shared),
        loss_sum=sum(result.loss_sum for result in shared),
        correct=sum(result.correct for result in shared),
        count=sum(result.count or result.samples for result in shared),  # older files have no count
    )


class MetricsBuffer:
    """Collects one epoch's steps on this rank, and combines them over the ranks at each flush.

    Parameters
    ----------
    log_every : largest number of steps between two flushes. Slow steps are flushed about every two
        seconds, so that the ranks soon agree on a request to stop.
    overflow_is_normal : infinite gradients are no error, since a GradScaler skips such steps.
    equal_gradients : all ranks hold the same gradients after ``synchronize``.
    on_steps : takes the records of the flushed steps.

    The attribute ``result`` holds the epoch's sums up to the last flush; set it to those of the
    steps before a resume. ``exchanges`` is how many of the last parts of "sync" begin with a
    message, and so wait for the slowest rank. ``emulated`` : losses are NaN, which is no error.
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
        on_steps: Callable[[list[StepRecord]], object] = lambda records: None,
    ) -> None:
        self.result = EpochResult()
        self.exchanges = 64
        self.emulated = False
        self._counted_until = time.perf_counter()
        self._world = world
        self._timer = timer
        self._epoch = epoch
        self._log_every = log_every
        self._overflow_is_normal = overflow_is_normal
        self._equal_gradients = equal_gradients
        self._on_steps = on_steps
        self._pending: list[StepOutcome] = []
        self._finish: Callable[[], bool] | None = None  # of a flush that has not recorded yet
        self._interval = 1
        self._clock_offset = clock_offset(world)
        self._warm = False  # this process has done a step

    def add(self, outcome: StepOutcome) -> None:
        """Keep the latest step."""
        self._pending.append(outcome)

    @property
    def due(self) -> bool:
        """Whether to flush now; the same on every rank."""
        # Ranks with equal gradients see a non-finite norm in the same step, so they agree without
        # a message. The norm is not read on a GPU, since reading it would block.
        latest = self._pending[-1]
        if len(self._pending) >= self._interval or latest.step % self._log_every == 0:
            return True
        sees_alike = self._equal_gradients and self._world.device.type == "cpu"
        return sees_alike and not math.isfinite(float(latest.numbers[-1]))

    def flush(self, *, stop: bool, wait: bool = True) -> bool:
        """Record the steps since the last flush; return whether any rank asks to stop. Collective.

        wait : for the other ranks. Otherwise the next flush records these steps and answers.
        Raises GroupError on every rank if the loss or the gradients are not finite on any rank.
        """
        stops = self._finish is not None and self._finish()
        self._finish = self._exchange(stop)
        if wait:
            stops = self._finish() or stops
        return stops

    def _exchange(self, stop: bool) -> Callable[[], bool]:
        """Start the messages of a flush; return the function that waits for them and records."""
        steps = self._pending
        self._pending = []
        records, own = self._read(steps)
        seconds = sum(record.step_seconds for record in records)
        # (steps + 1, 5): the last row holds stop requests and seconds.
        sums = start_all_reduce(self._world, [*own, [stop, seconds, 0, 0, 0]])
        waits = self._wait_seconds(steps)

        def finish() -> bool:
            self._finish = None
            *rows, (stop_requests, all_seconds, *_) = sums()
            totals = [_StepSums(*row) for row in rows]
            finite = 0  # the number of steps before the first that is not
            for record, here, total, wait in zip(records, own, totals, waits(), strict=True):
                if total.not_finite or not total.counted:
                    break
                record.loss = total.loss_sum / total.counted
                record.accuracy = total.correct / total.samples
                record.wait_seconds = wait
                self._count(record, here)
                finite += 1
            now = time.perf_counter()
            self.result.seconds += now - self._counted_until
            self._counted_until = now
            if finite:
                self._on_steps(records[:finite])
            if finite < len(records):
                self._raise_not_finite(records[finite], counted=totals[finite].counted)
            if records:
                self._timer.anchor()  # the GPU has just answered, so there is nothing to wait for
                mean_seconds = all_seconds / self._world.size / len(records)
                self._interval = max(1, int(_FLUSH_SECONDS / max(mean_seconds, 1e-6)))
            return stop_requests > 0

        return finish

    def _count(self, record: StepRecord, here: _StepSums) -> None:
        """Add a step to this rank's ``result``."""
        result = self.result
        result.loss_sum += here.loss_sum
        result.count += here.counted
        result.correct += here.correct
        result.samples += int(here.samples)
        result.steps += 1
        result.step_seconds += record.step_seconds
        if self._warm:
            result.steady_steps += 1
            result.steady_seconds += record.step_seconds
        self._warm = True

    def _read(self, steps: Sequence[StepOutcome]) -> tuple[list[StepRecord], list[_StepSums]]:
        """Return the steps' records, with this rank's numbers alone, and what the ranks add up."""
        if not steps:
            return [], []
        values = read([value for step in steps for value in step.numbers])
        records = []
        sums = []
        begin = 0
        for step in steps:
            end = begin + len(step.numbers)
            *parts, norm = values[begin:end]
            begin = end
            rows = rows_of(parts)
            own = summed(rows)
            # A mean over nothing is NaN, and so are its gradients.
            local_loss = sum(row.loss for row in rows)
            if own.counted:
                local_loss = own.loss / own.counted
            seconds = self._timer.seconds(step.times)
            records.append(
                StepRecord(
                    epoch=self._epoch,
                    step=step.step,
                    loss=math.nan,
                    local_loss=local_loss,
                    local_samples=int(own.samples),
                    learning_rate=step.learning_rate,
                    **{f"{name}_seconds": value for name, value in seconds.items()},
                )
            )
            finite = math.isfinite(own.loss) and (math.isfinite(norm) or self._overflow_is_normal)
            sums.append(_StepSums(*own, not finite and not self.emulated))
        return records, sums

    def _wait_seconds(self, pending: Sequence[StepOutcome]) -> Callable[[], list[float]]:
        """Return the function that returns how long each step's "sync" waited for the slowest rank.

        Collective; the function waits for the messages.
        """
        if self._world.size == 1 or not pending:
            return lambda: [0.0] * len(pending)
        count = self.exchanges
        parts = []  # the last exchanges of each step
        begins = []  # (steps, count) on the ranks' common clock
        for step in pending:
            of_sync = {"sync": step.times.get("sync", [])[-count:]}
            spans = self._timer.spans(of_sync)["sync"]
            row = [begin - self._clock_offset for begin, _ in spans]
            parts.append(spans)
            begins.append(row + [-math.inf] * (count - len(row)))
        latest = start_all_reduce(self._world, begins, dist.ReduceOp.MAX)

        def finish() -> list[float]:
            waits = []
            rows = latest()
            # As many as any rank has had in a step; each more would be sent in vain.
            self.exchanges = max(1, *(sum(map(math.isfinite, row)) for row in rows))
            for spans, row in zip(parts, rows, strict=True):
                wait = 0.0
                for (begin, end), last in zip(spans, row, strict=False):
                    late = last + self._clock_offset - begin
                    wait += min(max(0.0, late), end - begin)
                waits.append(wait)
            return waits

        return finish

    def _raise_not_finite(self, record: StepRecord, *, counted: float) -> NoReturn:
        if not counted:
            raise GroupError(
                f"no target counts in epoch {self._epoch}, step {record.step}, on any rank, so the "
                "loss is a mean over nothing. All ranks stop. Leave such batches out"
            )
        losses = gather_objects(self._world, str(record.local_loss), schema=str)  # JSON has no NaN
        culprits = [
            f"loss {loss} on rank {rank}"
            for rank, loss in enumerate(losses)
            if not math.isfinite(float(loss))
        ]
        what = ", ".join(culprits) or "the gradients overflowed, the loss is finite"
        raise GroupError(
            f"not finite in epoch {self._epoch}, step {record.step}: {what}. All ranks stop. "
            "Lower --learning-rate, warm up longer, or look for broken inputs"
        )
