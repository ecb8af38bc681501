"""Hooks that run between training steps: the ``Callback`` base class and validation.

``TrainingEngine.fit`` calls the hooks. Other callbacks are CheckpointManager, RunLogger, and
EpochLog in common/training.py.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.errors import UserError
from common.profiling.records import EpochReport, StepRecord
from common.training_engine.evaluation_loop import validate
from common.training_engine.metrics import EpochResult, sum_over_ranks
from common.utils.progress import SECONDS_BETWEEN_LINES

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


@dataclass
class EpochEnd:
    """One epoch; all callbacks receive the same object in turn.

    result : this rank's numbers; ``result.complete`` is False after a request to stop.
    is_last : whether no epoch follows, whatever the callbacks decide.
    report, is_best, stop_reason : set by ``Validator``. A ``stop_reason``, a sentence, ends the
        training after this epoch.
    """

    epoch: int
    result: EpochResult
    report: EpochReport | None = None
    is_best: bool = False
    stop_reason: str = ""
    is_last: bool = False

    def lines(self) -> list[str]:
        """Return what a person is told of the epoch, once the Validator has seen it."""
        assert self.report is not None
        best = ", best so far" if self.is_best else ""
        return [self.report.line() + best, *filter(None, [self.stop_reason])]


class Callback:
    """Base class of defaults: override the hooks that you need.

    Every rank calls every hook, in the order of the list of callbacks, so a hook may communicate.
    """

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Act before the first step, with the prepared engine."""

    def on_step_end(self, step_in_epoch: int) -> None:
        """Act after each optimiser step; ``step_in_epoch`` counts from 1."""

    def on_steps(self, records: list[StepRecord]) -> None:
        """Take the records of the last steps; their numbers cover all ranks."""

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Act after each epoch, once all ranks hold the same weights and buffers."""

    def on_train_end(self) -> None:
        """Act after the last epoch."""


class AfterEachStep(Callback):
    """Calls ``action`` after every optimiser step."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def on_step_end(self, step_in_epoch: int) -> None:
        """Call the action."""
        self._action()


class Validator(Callback):
    """Validates after each epoch, finds the best epoch, and stops at the target.

    Parameters
    ----------
    loader : this rank's share of the validation set; None: no validation.
    target_accuracy, patience : stop once the accuracy (0 to 1) has reached the target in
        ``patience`` epochs in a row; None: never.
    progress : "best_accuracy" and "in_a_row" of an earlier part of the training. The attribute
        ``progress`` holds their current values, for the checkpoints.
    flip : as for ``predict``.
    """

    def __init__(
        self,
        loader: Iterable[tuple[Tensor, Tensor]] | None,
        criterion: nn.Module,
        *,
        target_accuracy: float | None = None,
        patience: int = 1,
        progress: Mapping[str, Any] | None = None,
        flip: bool = False,
    ) -> None:
        if target_accuracy is not None and not 0 < target_accuracy <= 1:
            raise UserError(
                f"target_accuracy: got {target_accuracy}, give a fraction above 0 and of at most "
                "1, e.g. 0.85"
            )
        if patience < 1:
            raise UserError(
                f"patience: got {patience}, give the number of epochs in a row, at least 1"
            )
        self._loader = loader
        self._criterion = criterion
        self._flip = flip
        self._target = target_accuracy
        self._patience = patience
        self.progress = {"best_accuracy": -1.0, "in_a_row": 0} | dict(progress or {})

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Keep the engine, whose model is validated."""
        self._engine = engine

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Validate, unless the epoch was cut short, and set the epoch's report. Collective.

        The ranks agree on it, since their accuracies are the same.
        """
        end.report = self._report(end)
        if not end.result.complete:
            return
        accuracy = end.report.deciding_accuracy
        end.is_best = accuracy > self.progress["best_accuracy"]  # NaN is not
        if end.is_best:
            self.progress["best_accuracy"] = accuracy
        if self._target is None or not accuracy >= self._target:  # NaN does not reach it
            self.progress["in_a_row"] = 0
            return
        self.progress["in_a_row"] += 1
        if self.progress["in_a_row"] >= self._patience:
            end.stop_reason = f"Target accuracy reached in epoch {end.epoch}: {self._target:g}"
            if self._patience > 1:
                end.stop_reason += f" in {self._patience} epochs in a row"

    def _report(self, end: EpochEnd) -> EpochReport:
        """Return the epoch's numbers over all ranks, of the weights and of their average."""
        engine = self._engine
        result = end.result
        loss_sum, correct, samples = sum_over_ranks(
            engine.world, [result.loss_sum, result.correct, result.samples]
        )
        # Loss and accuracy of the weights, and of their average.
        scores = [(math.nan, math.nan), (math.nan, math.nan)]
        if self._loader is not None and result.complete:
            for index, model in enumerate(engine.evaluated_models):
                scores[index] = validate(
                    model,
                    engine.world,
                    self._criterion,
                    self._loader,
                    amp_dtype=engine.amp_dtype,
                    flip=self._flip,
                )
        (val_loss, val_accuracy), (ema_loss, ema_accuracy) = scores
        return EpochReport(
            epoch=end.epoch,
            train_loss=loss_sum / max(1, samples),
            train_accuracy=correct / max(1, samples),
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            ema_val_loss=ema_loss,
            ema_val_accuracy=ema_accuracy,
            learning_rate=engine.optimizer.param_groups[0]["lr"],
            samples_per_second=samples / max(result.seconds, 1e-9),
            seconds=result.seconds,
        )


class History(Callback):
    """Steps the scheduler after each epoch, keeps the epochs' reports, and prints them on rank 0.

    Parameters
    ----------
    scheduler : None: the engine steps it.
    extra : entries for the checkpoints; gets each epoch's ``val_accuracy``.
    """

    def __init__(self, scheduler: LRScheduler | None, extra: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._extra = extra
        self._reports: list[EpochReport] = []

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Start the clock."""
        self._prints = engine.world.is_rank0
        self._began = time.perf_counter()
        self._printed = self._began  # when the last line was printed

    def on_steps(self, records: list[StepRecord]) -> None:
        """Print the last step, unless a line was printed in the last ten seconds."""
        now = time.perf_counter()
        if not self._prints or now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        last = records[-1]
        learned = f"loss {last.loss:.3f}  accuracy {last.accuracy:.3f}"
        print(f"epoch {last.epoch}  step {last.step}  {learned}", flush=True)

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Keep and print the report; Validator comes first, CheckpointManager later."""
        assert end.report is not None
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(end.report.val_loss)
        elif self._scheduler is not None:
            self._scheduler.step()
        self._reports.append(end.report)
        self._extra["val_accuracy"] = end.report.val_accuracy
        self._printed = time.perf_counter()
        if self._prints:
            print(*end.lines(), sep="\n", flush=True)

    def on_train_end(self) -> None:
        """Print time and speed of the whole training."""
        if not self._prints:
            return
        seconds = time.perf_counter() - self._began
        samples = sum(report.samples_per_second * report.seconds for report in self._reports)
        rate = f"{samples / seconds:,.0f} samples/s over all ranks"
        print(f"Training time {seconds:.1f} s with validation; {rate}", flush=True)

    @property
    def by_name(self) -> dict[str, list[float]]:
        """The numbers of all epochs, by name."""
        numbers = {}
        for name in EpochReport.__struct_fields__:
            numbers[name] = [getattr(report, name) for report in self._reports]
        return numbers
