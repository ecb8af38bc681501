"""Hooks that run between training steps: the ``Callback`` base class and validation.

``TrainingEngine.fit`` calls the hooks. Other callbacks are CheckpointManager, RunLogger, and
EpochLog in common/training.py.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.errors import UserError
from common.profiling.records import EpochReport, StepRecord
from common.training_engine.batches import MicroBatch
from common.training_engine.evaluation_loop import Scores, validate
from common.training_engine.forward import Criterion, ForwardPass
from common.training_engine.metrics import EpochResult, sum_over_ranks
from common.training_engine.own_metrics import Metrics
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
    metrics : your own, by name, see own_metrics.py. The first one decides which epoch is the best.
        Without any it is the accuracy, or the lowest loss where no accuracy is known.
    progress : "best_score" and "in_a_row" of an earlier part of the training. The attribute
        ``progress`` holds their current values, for the checkpoints.
    flip : as for ``evaluated``.
    """

    def __init__(
        self,
        loader: Iterable[MicroBatch] | None,
        criterion: Criterion | ForwardPass,
        *,
        target_accuracy: float | None = None,
        patience: int = 1,
        metrics: Metrics | None = None,
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
        self._metrics = metrics or {}
        saved = dict(progress or {})
        best = saved.get("best_score", saved.get("best_accuracy", -math.inf))  # of older files
        self.progress = {"best_score": best, "in_a_row": saved.get("in_a_row", 0)}

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
        score = self._score(end.report)
        end.is_best = score > self.progress["best_score"]  # NaN is not
        if end.is_best:
            self.progress["best_score"] = score
        elif self._metrics and math.isnan(score):
            self._engine.notice("the first metric is not a number: this epoch cannot be the best")
        accuracy = end.report.deciding_accuracy
        if self._target is None or not accuracy >= self._target:  # NaN does not reach it
            self._check_target(accuracy)
            self.progress["in_a_row"] = 0
            return
        self.progress["in_a_row"] += 1
        if self.progress["in_a_row"] >= self._patience:
            end.stop_reason = f"Target accuracy reached in epoch {end.epoch}: {self._target:g}"
            if self._patience > 1:
                end.stop_reason += f" in {self._patience} epochs in a row"

    def _score(self, report: EpochReport) -> float:
        """Return what decides which epoch is the best: the highest."""
        if self._metrics:
            first = next(iter(self._metrics.values()))
            sign = -1 if getattr(first, "higher_is_better", True) is False else 1
            averaged = [name for name in report.metrics if name.startswith("ema_")]
            deciding = averaged or list(report.metrics) or [""]
            return sign * report.metrics.get(deciding[0], math.nan)
        if math.isnan(report.deciding_accuracy):
            return -report.deciding_loss
        return report.deciding_accuracy

    def _check_target(self, accuracy: float) -> None:
        """Raise UserError if the target is one of an accuracy that nobody knows."""
        known = not math.isnan(accuracy) or self._engine.emulation is not None
        if self._target is not None and not known:
            raise UserError(
                "target_accuracy needs an accuracy, and it is known only of class logits (samples, "
                "classes) with one label each: leave it out, or give metrics={'accuracy': ...}"
            )

    def _report(self, end: EpochEnd) -> EpochReport:
        """Return the epoch's numbers over all ranks, of the weights and of their average."""
        engine = self._engine
        result = end.result
        loss_sum, count, correct, samples = sum_over_ranks(
            engine.world, [result.loss_sum, result.count, result.correct, result.samples]
        )
        scores = [Scores(), Scores()]  # of the weights, and of their average
        if self._loader is not None and result.complete:
            for index, model in enumerate(engine.evaluated_models):
                scores[index] = validate(
                    model,
                    engine.world,
                    self._criterion,
                    self._loader,
                    metrics=self._metrics,
                    amp_dtype=engine.amp_dtype,
                    flip=self._flip,
                )
        own, average = scores
        metrics = {f"val_{name}": value for name, value in own.metrics.items()}
        metrics |= {f"ema_val_{name}": value for name, value in average.metrics.items()}
        return EpochReport(
            epoch=end.epoch,
            train_loss=loss_sum / max(1, count),
            train_accuracy=correct / max(1, samples),
            val_loss=own.loss,
            val_accuracy=own.accuracy,
            ema_val_loss=average.loss,
            ema_val_accuracy=average.accuracy,
            learning_rate=engine.optimizer.param_groups[0]["lr"],
            samples_per_second=samples / max(result.seconds, 1e-9),
            seconds=result.seconds,
            metrics=metrics,
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
        learned = f"loss {last.loss:.3f}"
        if not math.isnan(last.accuracy):
            learned += f"  accuracy {last.accuracy:.3f}"
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
        numbers: dict[str, list[float]] = {}
        for report in self._reports:
            of_epoch = asdict(report)
            for name, value in (of_epoch | of_epoch.pop("metrics")).items():
                numbers.setdefault(name, []).append(value)
        return numbers
