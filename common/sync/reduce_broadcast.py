"""Reduce and broadcast: the group adds on the way to rank 0, which need not receive every rank's gradients."""

import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync
from common.sync.message_plans import ReduceBroadcastPlan


class ReduceBroadcast(ReduceBroadcastPlan, GradientSync):
    """For each parameter a ``reduce`` to rank 0, the mean there, and a ``broadcast`` of it to all.

    With N ranks, P parameter tensors and M bytes of gradients, per step, as Gloo does it: ``reduce`` is a ring that adds,
    (N-1)/N M bytes from every rank, after which all but the root send their 1/N M to it; ``broadcast`` is a binomial tree,
    in which the root sends ceil(log2 N) M bytes and half of the ranks nothing.
    Time: (N-1 + 1 + ceil(log2 N)) P alpha + (2(N-1)/N + ceil(log2 N)) M / B (alpha: latency, B: bytes a second).
    """

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for gradient in self.gradients():
            total = gradient.contiguous()
            dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
            if dist.get_rank() == 0:
                total /= dist.get_world_size()
            dist.broadcast(total, src=0)
            if total is not gradient:  # channels_last: `total` was a contiguous copy
                gradient.copy_(total)
