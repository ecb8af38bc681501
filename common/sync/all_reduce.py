"""all_reduce by hand: one collective for each parameter, no root."""

import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync
from common.sync.message_plans import AllReducePlan


class AllReduce(AllReducePlan, GradientSync):
    """For each parameter one ``all_reduce`` that sums over the ranks, then a division by their number.

    With N ranks, P parameter tensors and M bytes of gradients, per step, as a ring: every rank, the root too, sends
    2(N-1)P messages, 2(N-1)/N M bytes, and receives as many.
    Time: 2(N-1)P alpha + 2(N-1)/N M / B (alpha: latency, B: bytes a second), and three copies of M bytes within memory. Each
    parameter waits for the one before.
    """

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        size = dist.get_world_size()
        for gradient in self.gradients():
            total = gradient.contiguous()
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
            total /= size
            if total is not gradient:  # channels_last: `total` was a contiguous copy
                gradient.copy_(total)
