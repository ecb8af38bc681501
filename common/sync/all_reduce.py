"""all_reduce by hand: one collective for each parameter, no root.

    0 --> 1        Gloo's all_reduce is a ring: N-1 rounds add, N-1 rounds pass the sums on.
    ^     v        In each round every rank sends 1/N of the tensor to the next rank.
    3 <-- 2        Each tensor waits until the one before is done.

Sends: every rank, rank 0 included, 2(N-1)P messages, 2(N-1)/N M bytes, and receives as much.
Time: 2(N-1)P alpha + 2(N-1)/N M / B + (N-1)/N M gamma, and three copies of M bytes in memory.
    [Patarasuk, Yuan 2009]
Common mistake: keeping the sum. It trains, with a learning rate N times too large. Another:
    averaging the weights in place of the gradients, which leaves each rank its own momentum.

(N ranks, P parameter tensors, M bytes of gradients; alpha seconds per message, B bytes per second
on a link, gamma seconds to add one byte.)
"""

import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync


class AllReduce(GradientSync):
    """One ``all_reduce`` for each parameter, then a division by the number of ranks."""

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        # Of any shape, e.g. (512, 256, 3, 3). A channels_last gradient comes as a contiguous copy,
        # which is copied back before the next one.
        for gradient in self.contiguous_gradients():
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
            gradient /= dist.get_world_size()
