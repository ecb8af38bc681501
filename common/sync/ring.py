"""A ring by hand: every rank sends only to the next one, and all links are busy all the time.

    0 --> 1        The buffer is cut into N chunks. In N-1 rounds each chunk travels around the ring
    ^     v        and every rank adds its own (reduce-scatter); in N-1 more rounds the finished
    3 <-- 2        chunks travel around (all-gather). Each round moves M/N bytes on every link.

Sends: every rank, rank 0 included, 2(N-1) messages, 2(N-1)/N M bytes, and receives as much. (If N
    does not divide the number of entries, it is up to two entries more or fewer.)
Time: 2(N-1) (alpha + M/N / B) + (N-1)/N M gamma, and one copy of M bytes in memory. Nothing is
    copied back, because ``p.grad`` becomes a view of the buffer (flat_buffer.py).
    [Patarasuk, Yuan 2009]
Common mistake: a blocking ``send`` on every rank before any ``recv``: all wait for each other.
    Another: an index off by one in the second half, so that one chunk is not the whole sum.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.sync.base import FlatSync
from common.sync.p2p import send_and_receive


class Ring(FlatSync):
    """Reduce-scatter and all-gather of one flat buffer."""

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        rank = dist.get_rank()
        size = dist.get_world_size()
        chunks = total.tensor_split(size)  # N views; the first ones may have one entry more
        ring_reduce_scatter(chunks)
        # Now rank r holds the whole sum of chunk r. It sends that chunk first.
        for step in range(size - 1):
            mine = chunks[(rank - step) % size]
            coming = chunks[(rank - step - 1) % size]
            send_and_receive(mine, coming, to=(rank + 1) % size, source=(rank - 1) % size)


def ring_reduce_scatter(chunks: Sequence[Tensor], *, tag: int = 0) -> None:
    """Sum chunk r over the ranks in place on rank r; the other chunks then hold partial sums.

    ``chunks`` : N tensors, each as long as on the other ranks. ``tag`` : see ``send_and_receive``.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    received = torch.empty_like(max(chunks, key=len))
    # In round k (from 0) rank r passes on chunk r-k-1, the sum of k+1 ranks so far.
    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        coming = chunks[(rank - step - 2) % size]
        arriving = received[: len(coming)]
        send_and_receive(mine, arriving, to=(rank + 1) % size, source=(rank - 1) % size, tag=tag)
        coming += arriving
