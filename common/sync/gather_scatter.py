"""Gather and scatter by hand: rank 0 collects every gradient, averages, and sends the mean back."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from common.sync.all_reduce import COPIES
from common.sync.base import GradientSync
from common.sync.message_cost import Operation


class GatherScatter(GradientSync):
    """For each parameter a ``gather`` to rank 0, the mean there, and a ``scatter`` of it to all.

    With N ranks, P parameter tensors and M bytes of gradients, per step: every rank but the root sends P messages,
    M bytes, and receives as many; the root receives and sends (N-1)P messages, (N-1)M bytes.
    Time: 2P alpha + 2(N-1)M / B, since everything passes the root's link (alpha: latency, B: bytes a second), and three copies
    of M bytes within memory.
    """

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for gradient in self.gradients():
            mine = gradient.contiguous()
            everyones = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
            dist.gather(mine, everyones, dst=0)

            means = None
            if rank == 0:
                mean = everyones[0]
                for other in everyones[1:]:
                    mean += other
                mean /= size
                means = [mean] * size
            dist.scatter(mine, means, src=0)
            if mine is not gradient:  # channels_last: `mine` was a contiguous copy
                gradient.copy_(mine)

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [
            operation
            for size in sizes
            for operation in (
                Operation(
                    "gather", size, summed_bytes=(ranks - 1) * size, copied_bytes=COPIES * size
                ),
                Operation("scatter", size),
            )
        ]
