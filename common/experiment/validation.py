"""Evaluate the test set after each epoch and at the end, shared among the ranks, unpadded."""

import numpy as np
from torch import nn

from common.data.dataset import Dataset
from common.data.loaders import EvaluationLoader
from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.training_engine import Predictions, TrainingEngine, predict


def evaluation_loader(dataset: Dataset, world: World) -> EvaluationLoader:
    """Return this rank's share of the test set."""
    return EvaluationLoader(
        dataset.test,
        mean=dataset.mean,
        std=dataset.std,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
    )


def predict_test_set(engine: TrainingEngine, dataset: Dataset) -> list[Predictions]:
    """Return the predictions for the whole test set, in order, on every rank. Collective.

    The first entry uses the weights, the second their moving average, if there is one.
    """
    loader = evaluation_loader(dataset, engine.world)
    return [_predict_all(model, loader, engine) for model in engine.evaluated_models]


def _predict_all(model: nn.Module, loader: EvaluationLoader, engine: TrainingEngine) -> Predictions:
    own = predict(model, engine.device, nn.CrossEntropyLoss(), loader, amp_dtype=engine.amp_dtype)
    parts = gather_objects(engine.world, (loader.ids.numpy(), own))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return Predictions(
        np.concatenate([part.labels for _, part in parts])[order],
        np.concatenate([part.predicted for _, part in parts])[order],
        sum(part.loss_sum for _, part in parts),
    )
