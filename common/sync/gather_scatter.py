"""Gather and scatter by hand: rank 0 collects every gradient, averages, and sends the mean back.

    1 --M--> +--------+ --M--> 1
    2 --M--> | rank 0 | --M--> 2       all traffic passes rank 0's link: (N-1)M in, (N-1)M out
    3 --M--> +--------+ --M--> 3

Sends: every rank but the root P messages, M bytes; the root (N-1)P messages, (N-1)M bytes. Each
    receives as much as it sends.
Time: 2P alpha + 2(N-1)M / B + (N-1)M gamma, and three copies of M bytes in memory.
Common mistake: dividing by a literal 4, or not at all. Another: calling ``gather`` on some ranks
    only, for instance inside ``if rank == 0``; the others then wait until the timeout.

(N ranks, P parameter tensors, M bytes of gradients; alpha seconds per message, B bytes per second
on a link, gamma seconds to add one byte.)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync


class GatherScatter(GradientSync):
    """For each parameter: ``gather`` to rank 0, average there, ``scatter`` the mean to all."""

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for gradient in self.contiguous_gradients():  # of any shape, e.g. (512, 256, 3, 3)
            gradient /= dist.get_world_size()  # before rank 0 adds: the sum is then the mean
            sum_through_root(gradient)


def sum_through_root(total: Tensor) -> None:
    """Sum ``total``, contiguous, over the ranks in place: rank 0 adds."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    # Only the root needs room for the N tensors that arrive.
    gathered = [torch.empty_like(total) for _ in range(size)] if rank == 0 else []
    dist.gather(total, gathered or None, dst=0)
    for other in gathered[1:]:
        gathered[0] += other
    # scatter wants a tensor for each rank; all are this one
    dist.scatter(total, [gathered[0]] * size if rank == 0 else None, src=0)
