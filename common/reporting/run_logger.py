"""What a run reports while it trains: on the terminal, in its folder, on dashboards. Rank 0 writes; all ranks call.

Order of the calls: ``log_header``, then a ``RunLogger`` whose ``steps`` and ``epoch`` are called during training, then
``report``.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from common.config.schema import Config
from common.data.dataset import Dataset
from common.distributed.process_group import World
from common.emulation.compute_profile import Profile
from common.profiling.comm_trace import Timeline
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.reporting.trackers import Trackers
from common.training import get_model_parameters
from common.training_engine import EpochReport, StepRecord


def log_header(
    config: Config,
    world: World,
    model: nn.Module,
    dataset: Dataset,
    plan: Mapping[str, Any],
    *,
    learning_rate: float,
    amp_dtype: torch.dtype | None,
    folder: RunFolder,
    profile: Profile | None,
) -> None:
    """Print what begins, and write the profile of emulated compute to the folder."""
    sync = "gradients stay here" if world.size == 1 else f"sync {config.sync}"
    say(
        f"{config.recipe or config.part}: {config.model} ({get_model_parameters(model):,} parameters) on {config.dataset} "
        f"({len(dataset.train):,} training images), {sync}, {world.backend or 'one process'} on "
        f"{world.device.type}, {'fp32' if amp_dtype is None else str(amp_dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads a rank"
    )
    micro_batches = plan["shards"] * plan["accumulation_steps"]
    parts = f"{plan['batch_size'] / micro_batches:g} a rank"
    if plan["accumulation_steps"] > 1:
        parts += f" x {plan['accumulation_steps']} accumulated"
    ranks = f"{plan['shards']} rank{'s' if plan['shards'] > 1 else ''}"
    if plan["shards"] != world.size:
        ranks = f"{plan['shards']} shards on {world.size} rank{'s' if world.size > 1 else ''}"
    say(
        f"batch: {parts} x {ranks} = {plan['batch_size']} global; "
        f"{plan['total_steps']} steps, {plan['steps_per_epoch']} an epoch; {config.opt}, {plan['schedule']}, rate "
        f"{learning_rate:g}"
    )
    if profile is not None:
        say(
            f"EMULATED: layers and update sleep as long as {profile.name} says ({profile.machine}, {profile.made}); nothing is "
            "learned, and there are no losses or accuracies"
        )
        folder.write_json("profile.json", profile.as_json())
    say(f"writing to {folder.path}")


class RunLogger:
    """Records the training on rank 0: metrics, progress, epochs.

    Parameters
    ----------
    history : of an earlier part of the same run.
    timeline : records the messages of some steps, whose times do not count.
    period : of the strategy.

    ``own_steps`` are this rank's of this process, ``history`` all of the run, complete on rank 0.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers | None,
        history: list[StepRecord],
        timeline: Timeline | None = None,
        period: int = 1,
    ) -> None:
        self._world, self._folder, self._progress = world, folder, progress
        self._trackers = trackers
        self.history = history
        self.own_steps: list[StepRecord] = []
        self.timeline, self.period = timeline, period
        self.epochs: list[EpochReport] = []
        self._began = time.perf_counter()

    def steps(self, records: list[StepRecord]) -> None:
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

    def epoch(self, report: EpochReport, *, step: int, is_best: bool) -> None:
        """Record an epoch that is done."""
        self.epochs.append(report)
        if not self._world.is_rank0:
            return
        self._folder.append_epoch(report)
        say(report.line() + (", best so far" if is_best else ""))
        numbers = {
            "val/loss": report.val_loss,
            "val/accuracy": report.val_accuracy,
            "val/ema_loss": report.ema_val_loss,
            "val/ema_accuracy": report.ema_val_accuracy,
            "epoch/train_loss": report.train_loss,
            "epoch/train_accuracy": report.train_accuracy,
            "epoch/samples_per_second": report.samples_per_second,
        }
        self._track(numbers, step=step)

    def _track(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send what is known: NaN stands for what was not measured."""
        if self._trackers is not None:
            known = {name: value for name, value in numbers.items() if not math.isnan(value)}
            self._trackers.log(known, step=step)

    @property
    def total_seconds(self) -> float:
        """Since the training began, evaluations and checkpoints included."""
        return time.perf_counter() - self._began
