"""Recursive halving and doubling by hand: as few bytes as a ring, in as few rounds as a tree."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_plans import HalvingDoublingPlan, halving_rounds, largest_power
from common.sync.p2p import send_and_receive


class HalvingDoubling(HalvingDoublingPlan, GradientSync):
    """In round k a rank exchanges half of what it still has with the rank N/2^k away and adds (halving); then the same
    rounds backwards, with sums (doubling). All gradients in one flat buffer (one a type).

    With N ranks, of which p is the largest power of two, L = log2 p, and M bytes of gradients, per step: a rank sends 2L
    messages, 2(p-1)/p M bytes. The N-p ranks beyond p hand M bytes to partners before and get M back after: such a
    partner, like the root where N > p, sends M more, the surplus rank M in all.
    Time: 2L alpha + (p-1)/p M (2 / B + gamma), and where N > p 2 alpha + M (2 / B + gamma) more (alpha: latency, B: bytes
    a second, gamma: seconds to add a byte); one copy of M bytes within memory, none back (common/sync/flat_buffer.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers = FlatBuffers()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for buffer in self._buffers.of(self.exchanged()):
            halving_doubling_all_reduce(buffer.collect(divisor=dist.get_world_size()))


def halving_doubling_all_reduce(total: Tensor) -> None:
    """Sum ``total``, contiguous and of any length, over any number of ranks in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    power = largest_power(size)
    if rank >= power:  # a surplus rank: its partner takes part for both
        dist.send(total, dst=rank - power)
        dist.recv(total, src=rank - power)
        return
    others = torch.empty_like(total)
    if rank + power < size:
        dist.recv(others, src=rank + power)
        total += others
    rounds = halving_rounds(total.numel(), rank, power)
    for partner, (begin, end), given in rounds:
        send_and_receive(total[slice(*given)], others[begin:end], to=partner, source=partner)
        total[begin:end] += others[begin:end]
    for partner, kept, given in reversed(rounds):
        send_and_receive(total[slice(*kept)], total[slice(*given)], to=partner, source=partner)
    if rank + power < size:
        dist.send(total, dst=rank + power)
