r"""A binomial tree by hand: sums go up to rank 0 in log2 N rounds, and the mean comes down again.

           0                up:    1->0, 3->2, 5->4, 7->6;   2->0, 6->4;   4->0
        /  |  \             down:  the same in reverse
       4   2   1            Each message carries all M bytes.
      / \   \               The parent of rank r is r without its lowest set bit.
     6   5   3
     |
     7

Sends: every rank but the root 1 message, M bytes, to its parent, and every rank 1 message, M
    bytes, to each of its children. The root has L = ceil(log2 N) children, a leaf has none.
Time: 2L (alpha + M / B) + L M gamma, and one copy of M bytes in memory. Nothing is copied back,
    because ``p.grad`` becomes a view of the buffer (flat_buffer.py).
    [Thakur, Rabenseifner, Gropp 2005]
Common mistake: waiting for a child that does not exist if N is not a power of two. Another:
    sending to the parent before all children are added.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from common.sync.base import FlatSync
from common.sync.message_cost import tree_children


class Tree(FlatSync):
    """Sum up the tree and copy down the tree, in one flat buffer."""

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        rank = dist.get_rank()
        size = dist.get_world_size()
        children = [rank + (1 << level) for level in range(tree_children(rank, size))]
        parent = rank & (rank - 1)
        received = torch.empty_like(total if children else total[:0])  # a leaf receives no sums

        # The nearest child comes first: it has the fewest ranks below it, so it is ready first.
        for child in children:
            dist.recv(received, src=child)
            total += received
        if rank > 0:
            dist.send(total, dst=parent)
            dist.recv(total, src=parent)
        # The child with the most ranks below it comes first: it has the most rounds still to go.
        for child in reversed(children):
            dist.send(total, dst=child)
