"""The test set, shared out over the ranks without padding: after each epoch, and at the end."""

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
    """Return the predictions for the whole test set, in its order, on every rank. Collective.

    The first are those of the weights, the second those of their moving average where it is kept.
    """
    loader = evaluation_loader(dataset, engine.world)
    models = [engine.model, *([engine.ema.module] if engine.ema is not None else [])]
    return [_predict_all(model, loader, engine) for model in models]


def _predict_all(model: nn.Module, loader: EvaluationLoader, engine: TrainingEngine) -> Predictions:
    own = predict(model, engine.device, nn.CrossEntropyLoss(), loader, amp_dtype=engine.amp_dtype)
    parts = gather_objects(engine.world, (loader.ids.numpy(), own))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return Predictions(
        np.concatenate([part.labels for _, part in parts])[order],
        np.concatenate([part.predicted for _, part in parts])[order],
        sum(part.loss_sum for _, part in parts),
    )
