"""Recursive halving and doubling by hand: the bytes of a ring in the rounds of a tree.

    round 1 (halves):    0 <-> 4   1 <-> 5   2 <-> 6   3 <-> 7
    round 2 (quarters):  0 <-> 2   1 <-> 3   4 <-> 6   5 <-> 7       then the same in reverse
    round 3 (eighths):   0 <-> 1   2 <-> 3   4 <-> 5   6 <-> 7

Halving: each rank sends its partner one half of what it still has, and adds what it receives to
the other half. Doubling: in reverse order, the partners send each other their finished sums.

Sends: let p be the largest power of two up to N, and L = log2 p. Each of the ranks 0 to p-1 sends
    2L messages, 2(p-1)/p M bytes. The N-p surplus ranks take no part in the rounds: before
    them each sends 1 message, M bytes, to a partner, and afterwards it receives M bytes back. So
    each partner, rank 0 among them if N > p, sends 1 message, M bytes, more.
Time: 2L alpha + (p-1)/p M (2 / B + gamma); if N > p, 2 alpha + M (2 / B + gamma) more. And one
    copy of M bytes in memory; nothing is copied back (flat_buffer.py).
    [Thakur, Rabenseifner, Gropp 2005]
Common mistake: forgetting the ranks beyond the power of two, whose gradients nobody adds.
    Another: doubling in the order of halving: the partner does not have the sum yet.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from common.sync.base import FlatSync
from common.sync.p2p import send_and_receive
from common.sync.plans.patterns import halving_rounds, largest_power


class HalvingDoubling(FlatSync):
    """Halving and doubling of one flat buffer."""

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        rank = dist.get_rank()
        size = dist.get_world_size()
        power = largest_power(size)
        if rank >= power:  # a surplus rank: its partner takes part on its behalf
            dist.send(total, dst=rank - power)
            dist.recv(total, src=rank - power)
            return

        received = torch.empty_like(total)
        if rank + power < size:
            dist.recv(received, src=rank + power)
            total += received

        # Each round's (partner, kept, given); both slices of ``total`` halve from round to round.
        rounds = halving_rounds(total.numel(), rank, power)
        for partner, kept, given in rounds:
            send_and_receive(total[given], received[kept], to=partner, source=partner)
            total[kept] += received[kept]
        for partner, kept, given in reversed(rounds):
            send_and_receive(total[kept], total[given], to=partner, source=partner)

        if rank + power < size:
            dist.send(total, dst=rank + power)
