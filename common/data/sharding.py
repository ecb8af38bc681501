"""Which rank sees which sample.

The order of an epoch is one permutation that all ranks compute alike; each global batch is a slice of it. A job cuts every
global batch into as many shards as it began with, and a shard into as many pieces as gradients are accumulated; a rank
computes the pieces of one or several shards (mostly: one). So neither the global batches nor the shards depend on the
number of ranks, and over all ranks every sample comes exactly once an epoch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError

_MIN_SAMPLES_PER_MICRO_BATCH = 2
"""BatchNorm needs two values a channel in training, and after VGG's last pooling a sample has one."""

_ORDER_STREAM, AUGMENTATION_STREAM, STEP_STREAM = 1, 2, 3


def stream_seed(seed: int, stream: int, *place: int) -> int:
    """Return a 63-bit seed for one random stream; different places give unrelated seeds."""
    high, low = np.random.SeedSequence([seed, stream, *place]).generate_state(2)
    return int(high) << 31 | int(low) >> 1


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in that epoch: a permutation, int64, of shape (samples,)."""
    generator = torch.Generator().manual_seed(stream_seed(seed, _ORDER_STREAM, epoch))
    return torch.randperm(samples, generator=generator)


def global_batch_bounds(samples: int, batch_size: int, micro_batches: int) -> list[int]:
    """Return where each global batch begins, and at last ``samples``.

    All batches have ``batch_size`` samples but the last, which has the rest; a rest too small to give every piece two
    samples joins the batch before it.
    """
    bounds = [*range(0, samples, batch_size), samples]
    if len(bounds) > 2 and samples - bounds[-2] < _MIN_SAMPLES_PER_MICRO_BATCH * micro_batches:
        del bounds[-2]
    return bounds


def rank_share(samples: int, rank: int, world_size: int) -> slice:
    """Return this rank's part of a batch of so many samples; shares differ by one sample at most."""
    return slice(samples * rank // world_size, samples * (rank + 1) // world_size)


class GlobalBatchSampler:
    """This rank's sample ids, one int64 tensor for each of its pieces of each global batch.

    Parameters
    ----------
    samples : size of the training set.
    batch_size : global batch size, over all ranks.
    shards : parts of a global batch, each with BatchNorm statistics of its own; None: one a rank. With more ranks than
        shards, some ranks get empty tensors.
    accumulation_steps : pieces of a shard, computed one after the other.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shards: int | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        shards = shards or world_size
        count = shards * accumulation_steps
        if batch_size < _MIN_SAMPLES_PER_MICRO_BATCH * count:
            parts = f"{shards} rank{'s' if shards > 1 else ''}"
            parts += f" x {accumulation_steps} accumulation steps" if accumulation_steps > 1 else ""
            raise UserError(
                f"--batch-size: got {batch_size} for {parts}; "
                f"BatchNorm needs two samples a rank, so give {_MIN_SAMPLES_PER_MICRO_BATCH * count} or more"
            )
        if samples < _MIN_SAMPLES_PER_MICRO_BATCH * count:
            raise UserError(
                f"the training set has {samples} images, too few for {shards} ranks: BatchNorm needs "
                "two samples a rank"
            )
        self.samples, self.seed, self.epoch = samples, seed, 1
        self._bounds = global_batch_bounds(samples, batch_size, count)
        # With more ranks than shards, the last ranks get none.
        own = range(shards)[rank_share(shards, rank, min(world_size, shards))]
        self.shards_here = max(1, len(own))
        self._count = count
        self.micro_batches = range(own.start * accumulation_steps, own.stop * accumulation_steps)
        if not own:  # a rank without a shard takes part with no sample, under an unused number
            self.micro_batches = range(count + rank, count + rank + 1)
        self._start = 0

    @property
    def global_batch_sizes(self) -> list[int]:
        """Samples of each global batch, over all ranks."""
        return [end - begin for begin, end in zip(self._bounds, self._bounds[1:], strict=False)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 1, whose order the next iteration has."""
        self.epoch = epoch

    def start_at(self, step: int) -> None:
        """Leave out the first ``step`` global batches in the next iteration, and in that only."""
        self._start = step

    def __len__(self) -> int:
        return len(self.global_batch_sizes) * len(self.micro_batches)

    def __iter__(self) -> Iterator[Tensor]:
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch)
        start, self._start = self._start, 0
        for begin, end in list(zip(self._bounds, self._bounds[1:], strict=False))[start:]:
            for micro_batch in self.micro_batches:
                has_samples = micro_batch < self._count
                share = rank_share(end - begin, micro_batch, self._count)
                yield order[begin:end][share if has_samples else slice(0)]
