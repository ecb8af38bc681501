"""After each epoch: the numbers over all ranks, whether they are the best so far, and whether the target is reached.

After the training, ``predict_test_set``. Both share the test set out over the ranks.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from common.config.schema import Config
from common.data.dataset import Dataset
from common.data.loaders import EvaluationLoader
from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.reporting.console import say
from common.reporting.run_logger import RunLogger
from common.training_engine import (
    EarlyStop,
    EpochResult,
    Predictions,
    TrainingEngine,
    predict,
    report_epoch,
)
from common.training_engine.checkpoint_manager import CheckpointManager


class Validator:
    """Keeps the best accuracy and the epochs in a row, which go into the checkpoints; ``entries`` are the resumed one's."""

    def __init__(
        self,
        config: Config,
        world: World,
        engine: TrainingEngine,
        checkpoint_manager: CheckpointManager,
        run_logger: RunLogger,
        dataset: Dataset,
        entries: Mapping[str, Any] | None,
    ) -> None:
        self._engine, self._world, self._config = engine, world, config
        self._checkpoint_manager, self._run_logger = checkpoint_manager, run_logger
        progress = (entries or {}).get("progress") or {}
        self._best = progress.get("best_accuracy", -1.0)
        self._stop = EarlyStop(config.target_accuracy, config.patience)
        self._stop.in_a_row = progress.get("in_a_row", 0)
        self._loader = evaluation_loader(dataset, world) if config.validates else None
        checkpoint_manager.extra |= {"world_size": world.size, "progress": progress}

    def epoch(self, epoch: int, result: EpochResult) -> bool:
        """Validate after one epoch, and return whether to end; the same on every rank."""
        report = report_epoch(self._engine, epoch, result, self._loader, nn.CrossEntropyLoss())
        accuracy = report.deciding_accuracy
        is_best = not math.isnan(accuracy) and accuracy > self._best
        ends = self._stop.reached(accuracy)
        self._best = accuracy if is_best else self._best
        self._checkpoint_manager.extra["progress"] = {
            "best_accuracy": self._best,
            "in_a_row": self._stop.in_a_row,
        }
        self._run_logger.epoch(report, step=self._engine.step, is_best=is_best)
        if is_best:
            self._checkpoint_manager.save_best(epoch, report.train_loss)
        if ends and self._world.is_rank0:
            target, patience = self._config.target_accuracy, self._config.patience
            say(f"Target accuracy reached: {target:g} in {patience} epochs in a row")
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


def predict_test_set(
    model: nn.Module, dataset: Dataset, world: World, *, amp_dtype: torch.dtype | None
) -> Predictions:
    """Share the test set out, without padding, and return the whole set's predictions, on every rank. Collective."""
    loader = evaluation_loader(dataset, world)
    own = predict(model, world.device, nn.CrossEntropyLoss(), loader, amp_dtype=amp_dtype)
    parts = gather_objects(world, (loader.ids.numpy(), own))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return Predictions(
        np.concatenate([part.labels for _, part in parts])[order],
        np.concatenate([part.predicted for _, part in parts])[order],
        sum(part.loss_sum for _, part in parts),
    )
