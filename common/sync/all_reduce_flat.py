"""all_reduce of one flat buffer: the latency of a single all_reduce, not of one per parameter.

    p1.grad p2.grad ... pP.grad        every rank copies its gradients / N into one buffer,
    [----------- buffer ----------]    one all_reduce sums the buffers (a ring, see all_reduce.py),
    p1.grad p2.grad ... pP.grad        and the gradients become views of the sum

Sends: every rank, rank 0 included, 2(N-1) messages, 2(N-1)/N M bytes, and receives as much.
Time: 2(N-1) alpha + 2(N-1)/N M / B + (N-1)/N M gamma, and one copy of M bytes in memory. Nothing
    is copied back, because ``p.grad`` becomes a view of the buffer (flat_buffer.py).
    [Patarasuk, Yuan 2009]
Common mistake: averaging the copy that ``torch.cat`` makes, but not writing it back to
    ``p.grad``: the optimiser still reads this rank's own gradients.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

import torch.distributed as dist
from torch import Tensor

from common.sync.base import FlatSync


class AllReduceFlat(FlatSync):
    """One ``all_reduce`` sums all gradients."""

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
