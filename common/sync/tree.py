"""A binomial tree by hand: sums go up to rank 0 in log2 N rounds, and the mean comes down the same way."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_cost import tree_children
from common.sync.message_plans import TreePlan


class Tree(TreePlan, GradientSync):
    """Rank r's parent is r without its lowest bit that is 1; all gradients in one flat buffer (one a type).

    With N ranks, M bytes of gradients and L = ceil(log2 N), per step: every rank but the root sends M bytes to its parent
    and, like the root, M to each of its children, of which the root has L and a leaf none.
    Time: 2L (alpha + M / B) + L M gamma (alpha: latency, B: bytes a second, gamma: seconds to add a byte), and one copy
    of M bytes within memory; as ``p.grad`` becomes a view of the buffer (common/sync/flat_buffer.py), none back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers = FlatBuffers()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for buffer in self._buffers.of(self.exchanged()):
            tree_all_reduce(buffer.collect(divisor=dist.get_world_size()))


def tree_all_reduce(total: Tensor) -> None:
    """Sum ``total``, contiguous, over the ranks in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    children = [rank + (1 << level) for level in range(tree_children(rank, size))]
    parent = rank & (rank - 1)
    others = torch.empty_like(total if children else total[:0])
    for child in children:
        dist.recv(others, src=child)
        total += others
    if rank > 0:
        dist.send(total, dst=parent)
        dist.recv(total, src=parent)
    for child in reversed(children):  # the child with the most ranks below it first
        dist.send(total, dst=child)
