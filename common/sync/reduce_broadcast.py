"""Reduce and broadcast: the ranks add on the way to rank 0, which never holds N gradients.

    reduce: a ring that adds; its N parts end at rank 0    broadcast: a binomial tree
          0 --> 1 --> 2 --> 3 --> 0                            0 --> 2, then 0 --> 1 and 2 --> 3

Sends, with Gloo's algorithms: in the ring every rank N-1 messages per tensor, (N-1)/N M bytes. Then
    every rank but the root sends its finished part to the root: 1 message per tensor, M/N bytes. In
    the broadcast the root sends ceil(log2 N) messages per tensor, ceil(log2 N) M bytes; a rank
    sends M bytes to each of its children (tree.py), and at least half of the ranks have none.
Time: (N + ceil(log2 N)) P alpha + (2(N-1)/N + ceil(log2 N)) M / B + (N-1)/N M gamma.
    [Thakur, Rabenseifner, Gropp 2005]
Common mistake: using the tensor after ``reduce`` on a rank other than the root. It holds a partial
    sum there.

(N ranks, P parameter tensors, M bytes of gradients; alpha seconds per message, B bytes per second
on a link, gamma seconds to add one byte.)
"""

import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync


class ReduceBroadcast(GradientSync):
    """For each parameter: ``reduce`` to rank 0, divide there, ``broadcast`` the mean."""

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for gradient in self.contiguous_gradients():  # of any shape, e.g. (512, 256, 3, 3)
            dist.reduce(gradient, dst=0, op=dist.ReduceOp.SUM)
            if dist.get_rank() == 0:
                gradient /= dist.get_world_size()
            dist.broadcast(gradient, src=0)
