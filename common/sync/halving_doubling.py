"""Recursive halving and doubling by hand: as few bytes as a ring, in as few rounds as a tree."""

from collections.abc import Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_cost import Operation, after_copy, buffers
from common.sync.p2p import send_and_receive


class HalvingDoubling(GradientSync):
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

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        power, found = _largest_power(ranks), []
        for size in buffers(sizes):
            fold = [size] if ranks > power else []
            halves = [
                -(-(size // size.itemsize) >> level) * size.itemsize
                for level in range(1, power.bit_length())
            ]
            found += after_copy(
                size,
                [Operation("exchange", half, summed_bytes=half) for half in fold + halves]
                + [Operation("exchange", half) for half in halves[::-1] + fold],
            )
        return found

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: the other half in each round, then one's own."""
        power, sent = _largest_power(ranks), 0
        for size in buffers(sizes):
            if rank >= power:
                sent += size
                continue
            halves = _halves(size // size.itemsize, rank, power)
            sent += (
                sum(b - a + d - c for _, (a, b), (c, d) in halves) * size.itemsize
                + (rank + power < ranks) * size
            )
        return Fraction(sent)


def _largest_power(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


def _halves(
    entries: int, rank: int, power: int
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return, for each round, the partner, the half that ``rank`` keeps and the half that it gives away, as (begin, end)."""
    rounds, begin, end, distance = [], 0, entries, power // 2
    while distance:
        low, high = (begin, (begin + end) // 2), ((begin + end) // 2, end)
        kept, given = (high, low) if rank & distance else (low, high)
        rounds.append((rank ^ distance, kept, given))
        (begin, end), distance = kept, distance // 2
    return rounds


def halving_doubling_all_reduce(total: Tensor) -> None:
    """Sum ``total``, contiguous and of any length, over any number of ranks in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    power = _largest_power(size)
    if rank >= power:  # a surplus rank: its partner takes part for both
        dist.send(total, dst=rank - power)
        dist.recv(total, src=rank - power)
        return
    others = torch.empty_like(total)
    if rank + power < size:
        dist.recv(others, src=rank + power)
        total += others
    rounds = _halves(total.numel(), rank, power)
    for partner, (begin, end), given in rounds:
        send_and_receive(total[slice(*given)], others[begin:end], to=partner, source=partner)
        total[begin:end] += others[begin:end]
    for partner, kept, given in reversed(rounds):
        send_and_receive(total[slice(*kept)], total[slice(*given)], to=partner, source=partner)
    if rank + power < size:
        dist.send(total, dst=rank + power)
