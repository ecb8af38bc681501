"""The prediction loop: ``predict`` in this process alone, ``validate`` over all ranks."""

import math
from collections.abc import Iterable, Sized
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from common.distributed.process_group import World
from common.training_engine.amp import autocast
from common.training_engine.metrics import sum_over_ranks


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
def predict(
    model: nn.Module,
    device: torch.device | str,
    criterion: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    limit: int | None = None,
    amp_dtype: torch.dtype | None = None,
    flip: bool = False,
) -> Predictions:
    """Predict every batch of ``loader`` in evaluation mode.

    The model runs without DistributedDataParallel, so one rank may evaluate alone. Its mode is
    restored. Results stay on the device until the last batch: a GPU then never waits for the host.

    Parameters
    ----------
    criterion : returns a batch's mean loss.
    limit : number of samples to predict, from the first; None: all.
    amp_dtype : type of mixed precision; None: float32.
    flip : also compute each image's mirror image, and predict from the mean of both logits.
    """
    model = unwrap(model)
    was_training = model.training
    model.eval()
    labels_seen = [torch.zeros(0, dtype=torch.int64, device=device)]
    predicted = [torch.zeros(0, dtype=torch.int64, device=device)]
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    left = limit
    try:
        for images, labels in loader:
            images = to_device(images[:left], device)
            labels = labels[:left].to(device)
            if left is not None:
                left -= len(labels)
            if len(labels) == 0:
                continue
            with autocast(device, amp_dtype):
                outputs = model(images)
                if flip:
                    outputs = (outputs + model(images.flip(3))) / 2
                loss = criterion(outputs, labels)
            loss_sum += loss.double() * len(labels)
            labels_seen.append(labels)
            predicted.append(outputs.argmax(dim=1))
    finally:
        model.train(was_training)
    return Predictions(
        labels=torch.cat(labels_seen).cpu().numpy(),
        predicted=torch.cat(predicted).cpu().numpy(),
        loss_sum=float(loss_sum),
    )


def validate(
    model: nn.Module,
    world: World,
    criterion: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    amp_dtype: torch.dtype | None = None,
    flip: bool = False,
) -> tuple[float, float]:
    """Return (mean loss, accuracy) over the samples of all ranks' loaders. Collective.

    Each sample counts once, even if a DistributedSampler repeats it to even out the ranks' shares.
    ``flip`` : as for ``predict``.
    """
    world.activity.enter("evaluation")
    mine = predict(
        model,
        world.device,
        criterion,
        loader,
        limit=_own_samples(loader),
        amp_dtype=amp_dtype,
        flip=flip,
    )
    mine_correct = float((mine.labels == mine.predicted).sum())
    loss_sum, correct, samples = sum_over_ranks(
        world, [mine.loss_sum, mine_correct, len(mine.labels)]
    )
    if not samples:
        return math.nan, math.nan
    return loss_sum / samples, correct / samples


def _own_samples(loader: Iterable[tuple[Tensor, Tensor]]) -> int | None:
    """Return how many of this rank's samples are not repetitions; None: all.

    A DistributedSampler deals out the samples in turn, and then repeats some of them.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    assert isinstance(sampler.dataset, Sized)  # the sampler needs its length, too
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))


def to_device(images: Tensor, device: torch.device | str) -> Tensor:
    """Move inputs to ``device``; 4-d images get channels_last strides, for faster convolutions."""
    if images.dim() == 4:
        return images.to(device, non_blocking=True, memory_format=torch.channels_last)
    return images.to(device, non_blocking=True)


def model_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to ``device``; its convolutions get the strides of ``to_device``'s images.

    Otherwise each convolution would convert its weights. A model that DistributedDataParallel
    wraps already keeps its strides: the buckets have them.
    """
    model = model.to(device)
    if isinstance(model, DistributedDataParallel):
        return model
    return model.to(memory_format=torch.channels_last)
