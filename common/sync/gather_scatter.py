"""Gather and scatter by hand: rank 0 collects every gradient, averages, and sends the mean back."""

import torch
import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync
from common.sync.message_plans import GatherScatterPlan


class GatherScatter(GatherScatterPlan, GradientSync):
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
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else []
            dist.gather(mine, gathered or None, dst=0)

            means = None
            if rank == 0:
                mean = gathered[0]
                for other in gathered[1:]:
                    mean += other
                mean /= size
                means = [mean] * size
            dist.scatter(mine, means, src=0)
            if mine is not gradient:  # channels_last: `mine` was a contiguous copy
                gradient.copy_(mine)
