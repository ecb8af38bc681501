"""After each epoch: the numbers over all ranks, whether they are the best so far, and whether the target is reached."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from common.config.schema import Config
from common.data.dataset import Dataset
from common.data.loaders import EvaluationLoader
from common.distributed.process_group import World
from common.reporting.console import say
from common.reporting.run_logger import RunLogger
from common.training_engine import EarlyStop, EpochResult, TrainingEngine, report_epoch
from common.training_engine.checkpoint_manager import CheckpointManager


class Validator:
    """Keeps the best accuracy and the epochs in a row, which go into the checkpoints; ``entries`` are those to go on from."""

    def __init__(
        self,
        config: Config,
        world: World,
        engine: TrainingEngine,
        saver: CheckpointManager,
        run_logger: RunLogger,
        dataset: Dataset,
        entries: Mapping[str, Any] | None,
    ) -> None:
        self._engine, self._saver, self._recorder, self._world, self._config = (
            engine,
            saver,
            run_logger,
            world,
            config,
        )
        progress = (entries or {}).get("progress") or {}
        self._best = progress.get("best_accuracy", -1.0)
        self._stop = EarlyStop(config.target_accuracy, config.patience)
        self._stop.in_a_row = progress.get("in_a_row", 0)
        self._loader = evaluation_loader(dataset, world) if config.validates else None
        saver.extra |= {"world_size": world.size, "progress": progress}

    def epoch(self, epoch: int, result: EpochResult) -> bool:
        """Judge one epoch, and say whether to end; the same on every rank."""
        report = report_epoch(self._engine, epoch, result, self._loader, nn.CrossEntropyLoss())
        accuracy = report.deciding_accuracy
        is_best = not math.isnan(accuracy) and accuracy > self._best
        ends = self._stop.reached(accuracy)
        self._best = accuracy if is_best else self._best
        self._saver.extra["progress"] = {
            "best_accuracy": self._best,
            "in_a_row": self._stop.in_a_row,
        }
        self._recorder.epoch(report, step=self._engine.step, is_best=is_best)
        if is_best:
            self._saver.save_best(epoch, report.train_loss)
        if ends and self._world.is_rank0:
            say(
                f"Target accuracy reached: {self._config.target_accuracy:g} in {self._config.patience} epochs in a row"
            )
        return ends


def evaluation_loader(dataset: Dataset, world: World) -> EvaluationLoader:
    """This rank's share of the test set, without padding."""
    return EvaluationLoader(
        dataset.test,
        mean=dataset.mean,
        std=dataset.std,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
    )
