"""Hooks that run between training steps: the ``Callback`` base class and validation.

``TrainingEngine.fit`` calls the hooks. Other callbacks are CheckpointManager, RunLogger, and those
in common/training.py and train.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from common.errors import UserError
from common.training_engine.evaluation_loop import validate
from common.training_engine.metrics import EpochResult, StepRecord, sum_over_ranks

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


@dataclass(frozen=True)
class EpochReport:
    """One epoch over all ranks.

    Losses are means over samples, accuracies lie between 0 and 1; ``ema_*`` belong to the moving
    average of the weights. NaN: no validation, no average, or emulated compute.
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
        """The accuracy that decides best epoch and stop: the moving average's, if there is one."""
        return self.val_accuracy if math.isnan(self.ema_val_accuracy) else self.ema_val_accuracy

    def line(self) -> str:
        """Return the numbers as one line of text."""
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

    def close(self) -> None:
        """Release what the callback holds, also after an error; it must not communicate."""


class AfterEachStep(Callback):
    """Calls ``action`` after every optimiser step."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def on_step_end(self, step_in_epoch: int) -> None:
        """Call the action."""
        self._action()


class EarlyStop:
    """Tells when ``target_accuracy`` (0 to 1) is reached in ``patience`` epochs in a row.

    A target of None is never reached. All ranks must pass the same accuracies, e.g. those from
    ``report_epoch``.
    """

    def __init__(self, target_accuracy: float | None, patience: int) -> None:
        if target_accuracy is not None and not 0 < target_accuracy <= 1:
            raise UserError(
                f"target_accuracy: got {target_accuracy}, give a fraction above 0 and of at most "
                "1, e.g. 0.85"
            )
        if patience < 1:
            raise UserError(
                f"patience: got {patience}, give the number of epochs in a row, at least 1"
            )
        self._target, self._patience = target_accuracy, patience
        self.in_a_row = 0

    def reached(self, accuracy: float) -> bool:
        """Count one more epoch; return whether the training may end."""
        good = self._target is not None and accuracy >= self._target
        self.in_a_row = self.in_a_row + 1 if good else 0
        return self.in_a_row >= self._patience

    def __str__(self) -> str:
        in_a_row = f" in {self._patience} epochs in a row" if self._patience > 1 else ""
        return f"Target accuracy reached: {self._target:g}{in_a_row}"


class Validator(Callback):
    """Validates after each epoch, finds the best epoch, and stops at the target.

    Parameters
    ----------
    loader : this rank's share of the validation set; None: no validation.
    progress : "best_accuracy" and "in_a_row" of an earlier part of the training. The attribute
        ``progress`` holds their current values, for the checkpoints.
    flip : as for ``predict``.
    """

    def __init__(
        self,
        loader: Iterable[tuple[Tensor, Tensor]] | None,
        criterion: nn.Module,
        stop: EarlyStop,
        progress: Mapping[str, Any] | None = None,
        *,
        flip: bool = False,
    ) -> None:
        self._loader, self._criterion, self._stop, self._flip = loader, criterion, stop, flip
        self.progress = {"best_accuracy": -1.0, "in_a_row": 0} | dict(progress or {})
        self._stop.in_a_row = self.progress["in_a_row"]

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Keep the engine, whose model is validated."""
        self._engine = engine

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Validate, unless the epoch was cut short, and set the epoch's report. Collective."""
        loader = self._loader if end.result.complete else None
        end.report = report_epoch(
            self._engine, end.epoch, end.result, loader, self._criterion, flip=self._flip
        )
        if not end.result.complete:
            return
        accuracy = end.report.deciding_accuracy
        end.is_best = accuracy > self.progress["best_accuracy"]  # NaN is not
        if end.is_best:
            self.progress["best_accuracy"] = accuracy
        if self._stop.reached(accuracy):
            end.stop_reason = str(self._stop)
        self.progress["in_a_row"] = self._stop.in_a_row


def report_epoch(
    engine: "TrainingEngine",
    epoch: int,
    result: EpochResult,
    val_loader: Iterable[tuple[Tensor, Tensor]] | None,
    criterion: nn.Module,
    *,
    flip: bool = False,
) -> EpochReport:
    """Return the epoch's numbers over all ranks; validate if there is a loader. Collective.

    Validates the weights, and their moving average if there is one. ``result`` is this rank's;
    ``flip`` is as for ``predict``. Call ``agree_on_buffers`` first.
    """
    loss_sum, correct, samples = sum_over_ranks(
        engine.world, [result.loss_sum, result.correct, result.samples]
    )
    scores = (
        [
            validate(
                model, engine.world, criterion, val_loader, amp_dtype=engine.amp_dtype, flip=flip
            )
            for model in engine.evaluated_models
        ]
        if val_loader is not None
        else []
    )
    unknown = (math.nan, math.nan)  # loss, accuracy
    model_scores, ema_scores = [*scores, unknown, unknown][:2]
    return EpochReport(
        epoch,
        loss_sum / max(1, samples),
        correct / max(1, samples),
        *model_scores,
        *ema_scores,
        engine.optimizer.param_groups[0]["lr"],
        samples / max(result.seconds, 1e-9),
        result.seconds,
    )
