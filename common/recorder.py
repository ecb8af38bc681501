"""What a run tells and leaves: on the terminal, in its folder, on dashboards. Rank 0 speaks and writes; all ranks call.

Order of the calls: ``introduce``, then a ``Recorder`` whose ``steps`` and ``epoch`` are called during training, then
``report``.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.compute_profile import Profile
from common.config import Config
from common.console import Progress, card, say
from common.data.dataset import Dataset
from common.distributed import World
from common.evaluation import generate_eval_report
from common.measured import median_seconds, timed
from common.records import RunFolder, peak_memory_bytes
from common.timeline import Timeline
from common.timing import SECTIONS
from common.trackers import Trackers
from common.training import get_model_parameters
from common.training_engine import EpochReport, Predictions, StepRecord


def introduce(config: Config, world: World, model: nn.Module, dataset: Dataset, plan: Mapping[str, Any], *,
              learning_rate: float, amp_dtype: torch.dtype | None, folder: RunFolder, profile: Profile | None) -> None:
    """Say what begins, and keep the profile of emulated compute in the folder."""
    sync = "gradients stay here" if world.size == 1 else f"sync {config.sync}"
    say(f"{config.recipe or config.part}: {config.model} ({get_model_parameters(model):,} parameters) on {config.dataset} "
        f"({len(dataset.train):,} training images), {sync}, {world.backend or 'one process'} on "
        f"{world.device.type}, {'fp32' if amp_dtype is None else str(amp_dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads a rank")
    pieces = plan["shards"] * plan["accumulation_steps"]
    parts = f"{plan['batch_size'] / pieces:g} a rank"
    if plan["accumulation_steps"] > 1:
        parts += f" x {plan['accumulation_steps']} accumulated"
    ranks = f"{plan['shards']} rank{'s' if plan['shards'] > 1 else ''}"
    if plan["shards"] != world.size:
        ranks = f"{plan['shards']} shards on {world.size} rank{'s' if world.size > 1 else ''}"
    say(f"batch: {parts} x {ranks} = {plan['batch_size']} global; "
        f"{plan['total_steps']} steps, {plan['steps_per_epoch']} an epoch; {config.opt}, {plan['schedule']}, rate "
        f"{learning_rate:g}")
    if profile is not None:
        say(f"EMULATED: layers and update sleep as long as {profile.name} says ({profile.machine}, {profile.made}); nothing is "
            "learned, and there are no losses or accuracies")
        folder.write_json("profile.json", profile.as_json())
    say(f"writing to {folder.path}")


class Recorder:
    """Takes down the training on rank 0: metrics, progress, epochs.

    Parameters
    ----------
    history : of an earlier part of the same run.
    timeline : records the messages of some steps, whose times do not count.
    period : of the strategy.

    ``own_steps`` are this rank's of this process, ``history`` all of the run, complete on rank 0.
    """

    def __init__(self, world: World, folder: RunFolder, progress: Progress, trackers: Trackers | None,
                 history: list[StepRecord], timeline: Timeline | None = None, period: int = 1) -> None:
        self._world, self._folder, self._progress, self._trackers = world, folder, progress, trackers
        self.history, self.own_steps = history, []
        self.timeline, self.period = timeline, period
        self.epochs: list[EpochReport] = []
        self._began = time.perf_counter()

    def steps(self, records: list[StepRecord]) -> None:
        """Record steps that are done."""
        self.history += records
        self.own_steps += records
        if not self._world.is_root:
            return
        self._folder.append_metrics(records)
        self._progress.show(records)
        if self._trackers is not None:
            for record in records:
                numbers = {"train/loss": record.loss, "train/accuracy": record.accuracy,
                           "train/learning_rate": record.learning_rate, "train/epoch": record.epoch,
                           **{f"seconds/{name}": value for name, value in record.seconds.items()}}
                self._track(numbers, step=record.step)

    def epoch(self, report: EpochReport, *, step: int, is_best: bool) -> None:
        """Record an epoch that is done."""
        self.epochs.append(report)
        if not self._world.is_root:
            return
        self._folder.append_epoch(report)
        say(report.line() + (", best so far" if is_best else ""))
        if self._trackers is not None:
            numbers = {"val/loss": report.val_loss, "val/accuracy": report.val_accuracy, "val/ema_loss": report.ema_val_loss,
                       "val/ema_accuracy": report.ema_val_accuracy, "epoch/train_loss": report.train_loss,
                       "epoch/train_accuracy": report.train_accuracy, "epoch/samples_per_second": report.samples_per_second}
            self._track(numbers, step=step)

    def _track(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send what is known: NaN stands for what was not measured."""
        self._trackers.log({name: value for name, value in numbers.items() if not math.isnan(value)}, step=step)

    @property
    def total_seconds(self) -> float:
        """Since the training began, evaluations and checkpoints included."""
        return time.perf_counter() - self._began


def report(config: Config, world: World, folder: RunFolder, dataset: Dataset, recorder: Recorder, *,
           predictions: Predictions | None, ema_predictions: Predictions | None, checkpoint: Path | str | None,
           ranks_equal: bool, resumed_from: str | None, batch_size: int, total_seconds: float,
           extra: Mapping[str, Any]) -> None:
    """Write report, figures and summary, and show the card; on rank 0 alone. Without ``predictions`` times alone."""
    result = ema_result = None
    if predictions is not None:
        result, ema_result = _report_accuracy(config, world, folder, dataset, recorder, predictions, ema_predictions, checkpoint)
    history = recorder.history
    steps = timed(history, config.untimed_steps, recorder.timeline)
    seconds = median_seconds(steps, recorder.period)
    step = seconds["step"] if seconds else None
    folder.write_json("summary.json", {
        "part": config.part, "recipe": config.recipe, "sync": config.sync, "nodes": world.size, "backend": world.backend,
        "device": world.device.type, "emulated": config.emulated, "compute": config.compute,
        "dataset": config.dataset, "model": config.model,
        "global_batch_size": batch_size, "steps": len(history),
        "last_step": history[-1].step if history else None, "step_seconds": step,
        "section_seconds": {name: seconds[name] for name in SECTIONS} if seconds else None,
        "wait_seconds": seconds["wait"] if seconds else None,
        "sync_share": seconds["sync"] / step if step else None,
        "samples_per_second": batch_size / step if step else None, "total_seconds": total_seconds,
        "train_loss_last_step": history[-1].loss if history else None, "test_loss": result["test_loss"] if result else None,
        "test_accuracy": result["accuracy"] if result else None,
        "ema_test_loss": ema_result["test_loss"] if ema_result else None,
        "ema_test_accuracy": ema_result["accuracy"] if ema_result else None, "ranks_hold_equal_weights": ranks_equal,
        "checkpoint": str(checkpoint) if checkpoint else None, "resumed_from": resumed_from,
        "peak_memory_bytes": peak_memory_bytes(), "folder": str(folder.path), **extra})
    rows = {
        "nodes": world.size,
        "seconds a step": f"{step:.3f} (median of {len(steps)})" if step else "none: nothing was left to train",
        "of it sync": f"{seconds['sync']:.3f} s, {seconds['sync'] / step:.0%}, {seconds['wait']:.3f} s of it waiting"
                      if step else "-",
        "total time": f"{total_seconds:.1f} s, {_throughput(recorder)}"}
    if result is not None:
        rows |= {"test accuracy": f"{result['accuracy']:.2%} of {result['samples']:,} images",
                 "test loss": f"{result['test_loss']:.3f}"}
    if ema_result is not None:
        rows["EMA accuracy"] = f"{ema_result['accuracy']:.2%}, of the averaged weights"
    title = config.recipe or f"{config.part}: {config.sync}"
    card(f"{title}, EMULATED" if config.emulated else title, rows | {
        "equal weights": ("yes, on all ranks" if ranks_equal else "NO: the ranks differ") if world.size > 1 else "one rank",
        "report" if result else "folder": folder.report if result else folder.path})


def _report_accuracy(config: Config, world: World, folder: RunFolder, dataset: Dataset, recorder: Recorder,
                     predictions: Predictions, ema_predictions: Predictions | None,
                     checkpoint: Path | str | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Write the evaluation's report and the figures; return its numbers, and those of the averaged weights."""
    from common.figures import draw_confusion_matrix, draw_loss  # matplotlib: only the rank that draws pays for it

    history = recorder.history
    result = generate_eval_report(predictions.labels, predictions.predicted, predictions.mean_loss, folder.report, checkpoint,
                                  class_names=dataset.class_names)
    folder.write_json("report.json", result)
    ema_result = None
    if ema_predictions is not None:
        ema_result = generate_eval_report(ema_predictions.labels, ema_predictions.predicted, ema_predictions.mean_loss,
                                          folder.path / "report_ema.txt", f"{checkpoint} (averaged weights)",
                                          class_names=dataset.class_names)
    way = f"{config.sync} on {world.size} ranks" if world.size > 1 else "one node"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(folder.path / "confusion_matrix.png", matrix=result["confusion_matrix"],
                          class_names=dataset.class_names, title=f"{title}: accuracy {result['accuracy']:.1%}")
    if history:
        draw_loss(folder.path / "loss.png", steps=[record.step for record in history],
                  losses=[record.loss for record in history], title=title)
    return result, ema_result


def _throughput(recorder: Recorder) -> str:
    """Samples a second of all ranks while training, over the epochs that are done."""
    seconds = sum(report.seconds for report in recorder.epochs)
    samples = sum(report.samples_per_second * report.seconds for report in recorder.epochs)
    return f"{samples / seconds:,.0f} samples/s in training" if seconds else "no epoch was left to train"

