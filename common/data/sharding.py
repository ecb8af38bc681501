"""Which rank sees which sample.

The order of an epoch is one permutation that all ranks compute alike; each global batch is a slice of it, and each
rank takes its share of every slice. So the global batches do not depend on the number of ranks, and over all ranks
every sample comes exactly once an epoch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError

_MIN_SAMPLES_PER_RANK = 2
"""BatchNorm needs two values a channel in training, and after VGG's last pooling a sample has one."""

_ORDER_STREAM, AUGMENTATION_STREAM, STEP_STREAM = 1, 2, 3


def stream_seed(seed: int, stream: int, *place: int) -> int:
    """Return a 63-bit seed for one random stream; different places give unrelated seeds."""
    words = np.random.SeedSequence([seed, stream, *place]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in that epoch: a permutation, int64, of shape (samples,)."""
    generator = torch.Generator().manual_seed(stream_seed(seed, _ORDER_STREAM, epoch))
    return torch.randperm(samples, generator=generator)


def global_batch_bounds(samples: int, batch_size: int, world_size: int) -> list[int]:
    """Return where each global batch begins, and at last ``samples``.

    All batches have ``batch_size`` samples but the last, which has the rest; a rest too small to give every rank two
    samples joins the batch before it.
    """
    bounds = [*range(0, samples, batch_size), samples]
    if len(bounds) > 2 and samples - bounds[-2] < _MIN_SAMPLES_PER_RANK * world_size:
        del bounds[-2]
    return bounds


def rank_share(samples: int, rank: int, world_size: int) -> slice:
    """Return this rank's part of a batch of so many samples; shares differ by one sample at most."""
    return slice(samples * rank // world_size, samples * (rank + 1) // world_size)


class GlobalBatchSampler:
    """This rank's sample ids of each global batch: an iterable of int64 tensors.

    Parameters
    ----------
    samples : size of the training set.
    batch_size : global batch size, over all ranks.
    """

    def __init__(self, samples: int, *, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        if batch_size < _MIN_SAMPLES_PER_RANK * world_size:
            raise UserError(f"--batch-size: got {batch_size} for {world_size} rank{'s' if world_size > 1 else ''}; "
                            f"BatchNorm needs two samples a rank, so give {_MIN_SAMPLES_PER_RANK * world_size} or more")
        if samples < _MIN_SAMPLES_PER_RANK * world_size:
            raise UserError(f"the training set has {samples} images, too few for {world_size} ranks: BatchNorm needs "
                            f"two samples a rank")
        self.samples, self.rank, self.world_size, self.seed, self.epoch = samples, rank, world_size, seed, 1
        self._bounds = global_batch_bounds(samples, batch_size, world_size)

    @property
    def global_batch_sizes(self) -> list[int]:
        """Samples of each global batch, over all ranks."""
        return [end - begin for begin, end in zip(self._bounds, self._bounds[1:], strict=False)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 1, whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[Tensor]:
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch)
        for begin, size in zip(self._bounds, self.global_batch_sizes, strict=False):
            yield order[begin:begin + size][rank_share(size, self.rank, self.world_size)]
