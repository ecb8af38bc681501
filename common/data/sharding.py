"""Which rank sees which sample.

    epoch          3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 ...      one permutation, the same on every rank
    global batch   [  step 1   ] [  step 2   ] ...           a slice of it for each step
    shards         [ 0 ][ 1 ][ 2 ][ 3 ]                      mostly one for each rank
    micro-batches  [a|b][a|b][a|b][a|b]                      with 2 accumulation steps

A job cuts every global batch into as many shards as it had ranks when it began, and a shard into
as many micro-batches as it accumulates gradients over. A rank computes the micro-batches of one
shard or of several. So neither the global batches nor the shards depend on the number of ranks, and
over all ranks every sample comes exactly once an epoch.

Common mistake: using no sampler and the same seed everywhere, so that every rank trains on the same
samples. Another: never calling ``set_epoch``, so that every epoch has the same order.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.say import count

# BatchNorm needs two values a channel in training, and after VGG's last pooling a sample has one.
_MIN_SAMPLES_PER_MICRO_BATCH = 2

# The random streams of a training.
_ORDER_STREAM = 1
AUGMENTATION_STREAM = 2
STEP_STREAM = 3
FLIP_STREAM = 4
CUTOUT_STREAM = 5


def stream_seed(seed: int, stream: int, *place: int) -> int:
    """Return a 63-bit seed for one random stream; different places give unrelated seeds.

    A plain ``seed + epoch`` would give seed 0 in epoch 2 the same order as seed 1 in epoch 1.
    """
    high, low = np.random.SeedSequence([seed, stream, *place]).generate_state(2)
    return int(high) << 31 | int(low) >> 1


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in that epoch: a permutation, int64, of shape (samples,)."""
    # A separate generator, so that random numbers drawn elsewhere do not change the order.
    generator = torch.Generator().manual_seed(stream_seed(seed, _ORDER_STREAM, epoch))
    return torch.randperm(samples, generator=generator)


def rank_share(samples: int, rank: int, world_size: int) -> slice:
    """Return this rank's part of a batch of ``samples``; shares differ by at most one sample.

    For example, 10 samples on 4 ranks give 2, 3, 2 and 3.
    """
    return slice(samples * rank // world_size, samples * (rank + 1) // world_size)


class GlobalBatchSampler:
    """This rank's sample ids: one int64 tensor for each of its micro-batches of each global batch.

    Parameters
    ----------
    samples : size of the training set.
    batch_size : global batch size, over all ranks.
    shards : parts of a global batch, each with BatchNorm statistics of its own; None: one a rank.
        With more ranks than shards, some ranks get empty tensors.
    accumulation_steps : micro-batches of a shard, computed one after the other.
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
        self._count = shards * accumulation_steps
        least = _MIN_SAMPLES_PER_MICRO_BATCH * self._count
        if batch_size < least:
            parts = count(shards, "rank")
            if accumulation_steps > 1:
                parts += f" x {accumulation_steps} accumulation steps"
            raise UserError(
                f"--batch-size: got {batch_size} for {parts}; "
                f"BatchNorm needs 2 samples per rank, so give {least} or more"
            )
        if samples < least:
            raise UserError(
                f"the training set has {samples} images, too few for {shards} ranks: "
                f"BatchNorm needs 2 per rank, so {least} or more"
            )
        self.samples = samples
        self.seed = seed
        self.epoch = 1
        # Where each global batch begins, and the end. The last batch has the remainder; one too
        # small to give every micro-batch two samples joins the previous batch.
        self._bounds = [*range(0, samples, batch_size), samples]
        if len(self._bounds) > 2 and samples - self._bounds[-2] < least:
            del self._bounds[-2]
        # The shards are shared out like samples. With more ranks than shards, the last get none.
        own = range(shards)[rank_share(shards, rank, min(world_size, shards))]
        self.shards_here = max(1, len(own))
        self.micro_batches = range(own.start * accumulation_steps, own.stop * accumulation_steps)
        if not own:  # this rank still takes part: an empty micro-batch with an unused number
            self.micro_batches = range(self._count + rank, self._count + rank + 1)
        self._start = 0

    @property
    def global_batch_sizes(self) -> list[int]:
        """Samples of each global batch, over all ranks."""
        return [end - begin for begin, end in pairwise(self._bounds)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 1, whose order the next iteration has."""
        self.epoch = epoch

    def start_at(self, step: int) -> None:
        """Skip the first ``step`` global batches in the next iteration, and in that only."""
        self._start = step

    def __len__(self) -> int:
        return len(self.global_batch_sizes) * len(self.micro_batches)

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches()

    def batches(self, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Yield the same ids on ``device``. They are copied there once, before the first."""
        # Every rank computes the whole order, so the ranks agree on it without a message.
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch).to(device)
        bounds = list(pairwise(self._bounds))[self._start :]
        self._start = 0
        for begin, end in bounds:
            global_batch = order[begin:end]
            for micro_batch in self.micro_batches:
                # (global batch,) -> (micro-batch,); numbers from ``_count`` on get an empty slice
                yield global_batch[rank_share(end - begin, micro_batch, self._count)]
