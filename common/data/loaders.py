"""Loaders: the training and evaluation loops iterate over their (images, labels) batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.data.augmentation import Normaliser, RandomCropFlip, draw
from common.data.dataset import Dataset, ImageSet
from common.data.sharding import GlobalBatchSampler


class TrainLoader:
    """Augmented micro-batches of this rank's share.

    Images are float32 of shape (batch, 3, 32, 32) in channels_last strides, labels int64 of shape
    (batch,).

    Parameters
    ----------
    sampler : chooses the samples; its ``set_epoch`` chooses the epoch.
    device : holds the whole set as bytes and runs the augmentation.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalBatchSampler, *, device: torch.device | str = "cpu"
    ) -> None:
        self.sampler, self._flip, self._device = sampler, dataset.flip, torch.device(device)
        # With these the engine weights the loss of each step, and numbers the micro-batches,
        # without a message.
        self.global_batch_sizes = sampler.global_batch_sizes
        self.micro_batches, self.shards_here = sampler.micro_batches, sampler.shards_here
        self._crop_flip = RandomCropFlip(dataset.train.images.to(device))
        self._labels = dataset.train.labels.to(device)
        self._normalise = Normaliser(
            dataset.mean, dataset.std, width=dataset.train.images.shape[2], device=device
        )

    def start_at(self, step: int) -> None:
        """Skip the first ``step`` global batches of the next epoch."""
        self.sampler.start_at(step)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = draw(
            self.sampler.samples,
            seed=self.sampler.seed,
            epoch=self.sampler.epoch,
            flip=self._flip,
            device=self._device,
        )
        for ids in self.sampler:
            ids = ids.to(self._device)
            yield self._normalise(self._crop_flip(ids, draws)), self._labels[ids]


class EvaluationLoader:
    """Batches of this rank's share of a set, without augmentation and without padding.

    The share is the samples rank, rank + world_size, ..., in ``ids``. Over all ranks every sample
    comes exactly once; a padded sampler would count some samples twice.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int = 500,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ids = torch.arange(len(images))[rank::world_size]
        self._set, self._batch_size, self._device = images, batch_size, device
        self._normalise = Normaliser(mean, std, width=images.images.shape[2], device=device)

    def __len__(self) -> int:
        return -(-len(self.ids) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # split() of no ids would give one empty batch.
        for ids in self.ids.split(self._batch_size) if len(self.ids) else ():
            yield (
                self._normalise(self._set.images[ids].to(self._device)),
                self._set.labels[ids].to(self._device),
            )
