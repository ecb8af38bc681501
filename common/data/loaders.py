"""Loaders: the training and evaluation loops iterate over their (images, labels) batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.data.augmentation import Normaliser, RandomCropFlip, cut_out, draw, draw_centres
from common.data.dataset import Dataset, ImageSet
from common.data.sharding import GlobalBatchSampler

# A GPU takes larger batches: with small ones it would wait for the host to launch its kernels.
_BATCH_SIZE_ON_CPU = 500
_BATCH_SIZE_ON_GPU = 2000


class TrainLoader:
    """Augmented micro-batches of this rank's share.

    Images are float32 of shape (batch, 3, 32, 32) in channels_last strides, labels int64 of shape
    (batch,).

    Parameters
    ----------
    sampler : chooses the samples; its ``set_epoch`` chooses the epoch.
    flip : which images are mirrored in an epoch: as in ``draw``. None are if the dataset does
        not allow it.
    cutout : side in pixels of the square that each image loses; 0: none.
    device : holds the whole set as bytes and runs the augmentation.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: GlobalBatchSampler,
        *,
        flip: str = "random",
        cutout: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sampler = sampler
        self._device = torch.device(device)
        self._flip = flip if dataset.flip else "none"
        self._cutout = cutout
        _, self._height, self._width, _ = dataset.train.images.shape
        # With these the engine weights the loss of each step, and numbers the micro-batches,
        # without a message.
        self.global_batch_sizes = sampler.global_batch_sizes
        self.micro_batches = sampler.micro_batches
        self.shards_here = sampler.shards_here
        self._crop_flip = RandomCropFlip(dataset.train.images.to(device))
        self._labels = dataset.train.labels.to(device)
        self._normalise = Normaliser(dataset.mean, dataset.std, width=self._width, device=device)

    def start_at(self, step: int) -> None:
        """Skip the first ``step`` global batches of the next epoch."""
        self.sampler.start_at(step)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = self.sampler.samples
        seed = self.sampler.seed
        epoch = self.sampler.epoch
        draws = draw(samples, seed=seed, epoch=epoch, flip=self._flip, device=self._device)
        centres = draw_centres(
            samples,
            height=self._height,
            width=self._width,
            seed=seed,
            epoch=epoch,
            device=self._device,
        )
        for ids in self.sampler.batches(self._device):
            images = self._normalise(self._crop_flip(ids, draws))
            if self._cutout:
                cut_out(images, centres[:, ids], size=self._cutout)
            yield images, self._labels[ids]


class EvaluationLoader:
    """Batches of this rank's share of a set, without augmentation and without padding.

    The share is the samples rank, rank + world_size, ..., in ``ids``. Over all ranks every sample
    comes exactly once; a padded sampler would count some samples twice.

    Parameters
    ----------
    batch_size : None: one that suits the device.
    device : holds the share as bytes, and normalises.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        share = slice(rank, None, world_size)
        self.ids = torch.arange(len(images))[share]
        # On a CPU these are views, not copies.
        self._images = images.images[share].to(device)
        self._labels = images.labels[share].to(device)
        if batch_size is None:
            on_cpu = torch.device(device).type == "cpu"
            batch_size = _BATCH_SIZE_ON_CPU if on_cpu else _BATCH_SIZE_ON_GPU
        self._batch_size = batch_size
        self._normalise = Normaliser(mean, std, width=images.images.shape[2], device=device)

    def __len__(self) -> int:
        return -(-len(self.ids) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, len(self.ids), self._batch_size):
            batch = slice(begin, begin + self._batch_size)
            yield self._normalise(self._images[batch]), self._labels[batch]
