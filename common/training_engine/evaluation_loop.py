"""The prediction loop: ``predict`` in this process alone, ``validate`` over all ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from common.distributed.process_group import World
from common.training_engine.amp import autocast
from common.training_engine.batches import MicroBatch, count_samples, first_samples, to_device
from common.training_engine.forward import (
    Count,
    Criterion,
    ForwardPass,
    Result,
    read,
    rows_of,
    summed,
)
from common.training_engine.metrics import sum_over_ranks
from common.training_engine.own_metrics import Metrics, OwnMetrics


@dataclass(frozen=True)
class Predictions:
    """True and predicted classes of n samples.

    labels, predicted : int64 arrays of shape (n,), in the loader's order.
    loss_sum : summed over the samples.
    """

    labels: np.ndarray
    predicted: np.ndarray
    loss_sum: float

    @property
    def mean_loss(self) -> float:
        """The mean loss over samples (not over batches)."""
        return self.loss_sum / len(self.labels) if len(self.labels) else math.nan

    @property
    def accuracy(self) -> float:
        """The fraction of samples predicted correctly, 0 to 1."""
        right = self.labels == self.predicted
        return float(right.mean()) if len(right) else math.nan


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, the one of a sharded copy, or ``model``."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    return getattr(model, "whole_model", model)  # fsdp.py trains a copy


@torch.inference_mode()
def evaluated(
    model: nn.Module,
    device: torch.device | str,
    forward: ForwardPass,
    loader: Iterable[MicroBatch],
    *,
    limit: int | None = None,
    amp_dtype: torch.dtype | None = None,
    flip: bool = False,
) -> Iterator[Result]:
    """Yield the result of every batch of ``loader`` in evaluation mode.

    The model runs without DistributedDataParallel, so one rank may evaluate alone. Its mode is
    restored.

    Parameters
    ----------
    limit : number of samples to predict, from the first; None: all.
    amp_dtype : type of mixed precision; None: float32.
    flip : also compute each image's mirror image, and predict from the mean of both logits.
    """
    model = unwrap(model)
    was_training = model.training
    model.eval()
    left = limit
    try:
        for loaded in loader:
            forward.refuse_ignored_labels(loaded)
            batch = to_device(first_samples(loaded, left), device)
            samples = count_samples(batch)
            if left is not None:
                left -= samples
            if samples:
                with autocast(device, amp_dtype):
                    result = forward(partial(_mirrored, model) if flip else model, batch)
                yield result
    finally:
        model.train(was_training)


def _mirrored(model: nn.Module, images: Tensor) -> Tensor:
    """Return the mean outputs of images (samples, channels, height, width) and their mirrors."""
    return (model(images) + model(images.flip(3))) / 2


def predict(
    model: nn.Module,
    device: torch.device | str,
    criterion: Criterion,
    loader: Iterable[MicroBatch],
    **options: Any,
) -> Predictions:
    """Predict the class of every sample; ``options`` are those of ``evaluated``.

    Results stay on the device until the last batch: a GPU then never waits for the host.
    """
    labels_seen = [torch.zeros(0, dtype=torch.int64, device=device)]
    predicted = [torch.zeros(0, dtype=torch.int64, device=device)]
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for result in evaluated(model, device, ForwardPass(criterion), loader, **options):
        loss_sum += result.loss.double() * result.samples
        labels_seen.append(result.targets)
        predicted.append(result.outputs.argmax(dim=1))
    return Predictions(
        labels=torch.cat(labels_seen).cpu().numpy(),
        predicted=torch.cat(predicted).cpu().numpy(),
        loss_sum=float(loss_sum),
    )


class Scores(NamedTuple):
    """Over the samples of all ranks: mean loss, accuracy (NaN if unknown), and your metrics."""

    loss: float = math.nan
    accuracy: float = math.nan
    metrics: Mapping[str, float] = MappingProxyType({})


def validate(
    model: nn.Module,
    world: World,
    criterion: Criterion | ForwardPass,
    loader: Iterable[MicroBatch],
    *,
    metrics: Metrics = MappingProxyType({}),
    amp_dtype: torch.dtype | None = None,
    flip: bool = False,
) -> Scores:
    """Return the scores over the samples of all ranks' loaders. Collective.

    Each sample counts once, even if a DistributedSampler repeats it to even out the ranks' shares.

    Parameters
    ----------
    metrics : by name, see ``OwnMetrics``. One that is called "accuracy" is the accuracy.
    amp_dtype, flip : as for ``evaluated``.
    """
    world.activity.enter("evaluation")
    forward = criterion if isinstance(criterion, ForwardPass) else ForwardPass(criterion)
    own_metrics = OwnMetrics(metrics, world)
    values: list[Count] = []
    for result in evaluated(
        model,
        world.device,
        forward,
        loader,
        limit=_own_samples(loader),
        amp_dtype=amp_dtype,
        flip=flip,
    ):
        values += result.numbers()
        own_metrics.update(result)
    own = summed(rows_of(read(values)))
    loss_sum, count, correct, samples = sum_over_ranks(world, [*own])
    found = own_metrics.compute()
    if not samples:
        return Scores(metrics=found)
    loss = loss_sum / count if count else math.nan
    return Scores(loss, found.get("accuracy", correct / samples), found)


def _own_samples(loader: Iterable[MicroBatch]) -> int | None:
    """Return how many of this rank's samples are not repetitions; None: all.

    A DistributedSampler deals out the samples in turn, and then repeats some of them.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    assert isinstance(sampler.dataset, Sized)  # the sampler needs its length, too
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))


def model_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to ``device``; its convolutions get the strides of ``to_device``'s images.

    Otherwise each convolution would convert its weights. A model that DistributedDataParallel
    wraps already keeps its strides: the buckets have them.
    """
    model = model.to(device)
    if isinstance(model, DistributedDataParallel):
        return model
    return model.to(memory_format=torch.channels_last)
