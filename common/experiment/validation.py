"""Evaluate the test set after each epoch and at the end, shared among the ranks, unpadded."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from common.data.loaders import EvaluationLoader
from common.distributed.collectives import gather_tensors
from common.models import PRETRAINED
from common.reporting.console import Progress, say
from common.run_setup import Setup
from common.say import minutes_text
from common.training_engine import Predictions, StepRecord, TrainingEngine, predict


class CountedLoader:
    """This rank's share of the test set, which shows on rank 0 how many of its images are done.

    ids : the share's samples. images : number of samples of all ranks.
    """

    def __init__(self, setup: Setup, progress: Progress) -> None:
        dataset = setup.dataset
        world = setup.world
        # A pretrained model enlarges images to 49 times as many pixels: large batches may not fit.
        batch_size = 500 if setup.config.model in PRETRAINED else None
        self._loader = EvaluationLoader(
            dataset.test,
            mean=dataset.mean,
            std=dataset.std,
            batch_size=batch_size,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
        self.ids = self._loader.ids
        self.images = len(dataset.test)
        self._progress = progress
        self._title = "evaluation on rank 0" if world.size > 1 else "evaluation"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._progress.counted(self._loader, title=self._title, images=len(self.ids))


def predict_test_set(
    setup: Setup, engine: TrainingEngine, loader: CountedLoader, steps: Sequence[StepRecord]
) -> list[Predictions]:
    """Return the predictions for the whole test set, in order, on every rank. Collective.

    The first entry uses the weights, the second their moving average, if there is one. None if the
    run only measures times. steps : of this process's training, which tell how long it takes.
    """
    if setup.config.only_times:
        return []
    flip = setup.config.tta == "flip"
    models = engine.evaluated_models
    if setup.world.is_rank0:
        what = f"{loader.images:,} test images"
        if setup.world.size > 1:
            what += f" on {setup.world.size} ranks"
        passes = len(models) * (2 if flip else 1)
        seconds = _forward_seconds(steps, images=len(loader.ids) * passes)
        if seconds is not None:
            what += f" takes about {minutes_text(seconds)}: --measure-only leaves it out"
        say(f"evaluating {what}")
    return [_predict_all(model, loader, engine, flip=flip) for model in models]


def _forward_seconds(steps: Sequence[StepRecord], *, images: int) -> float | None:
    """Return the seconds of forward for ``images`` images on this rank; None without steps."""
    per_image = [step.forward_seconds / step.local_samples for step in steps if step.local_samples]
    return median(per_image) * images if per_image else None


def _predict_all(
    model: nn.Module, loader: CountedLoader, engine: TrainingEngine, *, flip: bool
) -> Predictions:
    engine.world.activity.enter("evaluation")
    own = predict(
        model,
        engine.device,
        nn.CrossEntropyLoss(),
        loader,
        amp_dtype=engine.amp_dtype,
        flip=flip,
    )
    # (3, samples of this rank) int64
    columns = (loader.ids, torch.from_numpy(own.labels), torch.from_numpy(own.predicted))
    mine = {
        "columns": torch.stack(columns),
        "loss_sum": torch.tensor(own.loss_sum, dtype=torch.float64),
    }
    parts = gather_tensors(engine.world, mine)
    ids, labels, predicted = torch.cat([part["columns"] for part in parts], dim=1)
    order = ids.argsort()
    return Predictions(
        labels[order].numpy(),
        predicted[order].numpy(),
        sum(float(part["loss_sum"]) for part in parts),
    )
