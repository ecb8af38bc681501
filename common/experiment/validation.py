"""Evaluate the test set after each epoch and at the end, shared among the ranks, unpadded."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.data.dataset import Dataset
from common.data.loaders import EvaluationLoader
from common.distributed.collectives import gather_tensors
from common.distributed.process_group import World
from common.reporting.console import Progress, say
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


class CountedLoader:
    """An evaluation loader that shows on rank 0 how many of its images are done."""

    def __init__(self, loader: EvaluationLoader, progress: Progress, world: World) -> None:
        self._loader, self._progress = loader, progress
        self._title = "evaluation" + (" on rank 0" if world.size > 1 else "")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._progress.counted(self._loader, title=self._title, images=len(self._loader.ids))


def predict_test_set(
    engine: TrainingEngine, dataset: Dataset, progress: Progress
) -> list[Predictions]:
    """Return the predictions for the whole test set, in order, on every rank. Collective.

    The first entry uses the weights, the second their moving average, if there is one.
    """
    loader = evaluation_loader(dataset, engine.world)
    if engine.world.is_rank0:
        ranks = f" on {engine.world.size} ranks" if engine.world.size > 1 else ""
        say(f"evaluating {len(dataset.test):,} test images{ranks}")
    shown = CountedLoader(loader, progress, engine.world)
    return [_predict_all(model, loader, shown, engine) for model in engine.evaluated_models]


def _predict_all(
    model: nn.Module, loader: EvaluationLoader, shown: CountedLoader, engine: TrainingEngine
) -> Predictions:
    engine.world.activity.enter("evaluation")
    own = predict(model, engine.device, nn.CrossEntropyLoss(), shown, amp_dtype=engine.amp_dtype)
    # (3, samples of this rank) int64
    columns = (loader.ids, torch.from_numpy(own.labels), torch.from_numpy(own.predicted))
    loss_sum = torch.tensor(own.loss_sum, dtype=torch.float64)
    mine = {"columns": torch.stack(columns), "loss_sum": loss_sum}
    parts = gather_tensors(engine.world, mine)
    ids, labels, predicted = torch.cat([part["columns"] for part in parts], dim=1)
    order = ids.argsort()
    return Predictions(
        labels[order].numpy(),
        predicted[order].numpy(),
        sum(float(part["loss_sum"]) for part in parts),
    )
