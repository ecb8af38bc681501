"""A ring by hand: every rank sends to the next one only, and no link carries more than twice the gradients."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_plans import RingPlan
from common.sync.p2p import send_and_receive


class Ring(RingPlan, GradientSync):
    """The flat buffer (one a type) in N chunks: in N-1 rounds each chunk goes round and is added up (reduce-scatter), in
    N-1 more the finished chunks go round (all-gather).

    With N ranks and M bytes of gradients, per step: every rank, the root too, sends 2(N-1) messages, 2(N-1)/N M bytes (up
    to two entries more or less, where M is no multiple of N), and receives as many.
    Time: 2(N-1)(alpha + M/N / B) + (N-1)/N M gamma (alpha: latency, B: bytes a second, gamma: seconds to add a byte), and
    one copy of M bytes within memory; as ``p.grad`` becomes a view of the buffer (common/sync/flat_buffer.py), none back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers = FlatBuffers()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for buffer in self._buffers.of(self.exchanged()):
            ring_all_reduce(buffer.collect(divisor=dist.get_world_size()))


def ring_all_reduce(total: Tensor) -> None:
    """Sum ``total``, contiguous and of any length, over the ranks in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    bounds = [total.numel() * index // size for index in range(size + 1)]
    chunks = [total[begin:end] for begin, end in pairwise(bounds)]
    received = torch.empty_like(max(chunks, key=len))
    for step in range(size - 1):
        mine, coming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        send_and_receive(mine, received[: len(coming)], to=following, source=before)
        coming += received[: len(coming)]
    for step in range(size - 1):
        send_and_receive(
            chunks[(rank + 1 - step) % size],
            chunks[(rank - step) % size],
            to=following,
            source=before,
        )
