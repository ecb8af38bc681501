"""What a run reports while it trains: on the terminal, in its folder, on dashboards."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.distributed.process_group import World
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.reporting.trackers import Trackers
from common.training_engine import Callback, EpochEnd, EpochReport, StepRecord

if TYPE_CHECKING:
    from common.training_engine import TrainingEngine


class RunLogger(Callback):
    """Records the training: metrics, progress, epochs. All ranks keep the records; rank 0 writes.

    ``history`` holds the steps of the whole run, also of an earlier part, complete on rank 0;
    ``own_steps`` those of this process. ``total_seconds`` includes evaluations and checkpoints.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers | None,
        history: list[StepRecord],
    ) -> None:
        self._world, self._folder, self._progress = world, folder, progress
        self._trackers, self.history = trackers, history
        self.own_steps: list[StepRecord] = []
        self.epochs: list[EpochReport] = []
        self._began, self.total_seconds = time.perf_counter(), 0.0

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Take the engine, which counts the steps."""
        self._engine = engine

    def on_steps(self, records: list[StepRecord]) -> None:
        """Record steps that are done."""
        self.history += records
        self.own_steps += records
        if not self._world.is_rank0:
            return
        self._folder.append_metrics(records)
        self._progress.show(records)
        for record in records:
            numbers = {
                "train/loss": record.loss,
                "train/accuracy": record.accuracy,
                "train/learning_rate": record.learning_rate,
                "train/epoch": record.epoch,
                **{f"seconds/{name}": value for name, value in record.seconds.items()},
            }
            self._track(numbers, step=record.step)

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Record an epoch that was not cut short."""
        if not end.result.complete:
            return
        report = end.report
        assert report is not None  # the Validator comes first
        self.epochs.append(report)
        if not self._world.is_rank0:
            return
        self._folder.append_epoch(report)
        say(report.line() + (", best so far" if end.is_best else ""))
        if end.stop_reason:
            say(end.stop_reason)
        numbers = {
            "val/loss": report.val_loss,
            "val/accuracy": report.val_accuracy,
            "val/ema_loss": report.ema_val_loss,
            "val/ema_accuracy": report.ema_val_accuracy,
            "epoch/train_loss": report.train_loss,
            "epoch/train_accuracy": report.train_accuracy,
            "epoch/samples_per_second": report.samples_per_second,
        }
        self._track(numbers, step=self._engine.step)

    def on_train_end(self) -> None:
        """Stop the clock."""
        self.total_seconds = time.perf_counter() - self._began

    def _track(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send what is known: NaN stands for what was not measured."""
        if self._trackers is not None:
            known = {name: value for name, value in numbers.items() if not math.isnan(value)}
            self._trackers.log(known, step=step)
