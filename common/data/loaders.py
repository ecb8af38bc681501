"""Loaders: what the training and evaluation loops iterate over, as (images, labels) batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.data.augmentation import Normaliser, RandomCropFlip, draw
from common.data.dataset import Dataset, ImageSet
from common.data.sharding import GlobalBatchSampler


class TrainLoader:
    """Augmented micro-batches of this rank's share: images float32 (batch, 3, 32, 32), channels_last; labels int64.

    Parameters
    ----------
    sampler : chooses the samples; ``set_epoch`` on it chooses the epoch.
    device : where the set lies and the augmentation runs.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalBatchSampler, *, device: torch.device | str = "cpu"
    ) -> None:
        self.sampler, self._flip, self._device = sampler, dataset.flip, torch.device(device)
        self._crop_flip = RandomCropFlip(dataset.train.images.to(device))
        self._labels = dataset.train.labels.to(device)
        self._normalise = Normaliser(
            dataset.mean, dataset.std, width=dataset.train.images.shape[2], device=device
        )

    @property
    def global_batch_sizes(self) -> list[int]:
        """Samples of each step over all ranks; the engine weights the loss by them without a message."""
        return self.sampler.global_batch_sizes

    @property
    def micro_batches(self) -> range:
        """Which micro-batches of each global batch come from here, in this order."""
        return self.sampler.micro_batches

    @property
    def shards_here(self) -> int:
        """Of how many shards they are."""
        return self.sampler.shards_here

    def start_at(self, step: int) -> None:
        """Leave out the first ``step`` global batches of the next epoch."""
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
    """Batches of this rank's share of a set, as they are: sample ids rank, rank + world_size, ..., no padding.

    Over all ranks every sample comes exactly once, whatever the number of ranks. ``ids`` are this rank's.
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
