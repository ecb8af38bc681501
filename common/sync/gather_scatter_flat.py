"""Gather and scatter of one flat buffer: the root still carries everything, but in one message a rank."""

import torch
import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_plans import GatherScatterFlatPlan


class GatherScatterFlat(GatherScatterFlatPlan, GradientSync):
    """All gradients go into one buffer (one a type): one ``gather`` to rank 0, the sum there, one ``scatter`` of it.

    With N ranks and M bytes of gradients, per step: every rank but the root sends 1 message, M bytes, and receives as
    much; the root receives and sends N-1 messages, (N-1)M bytes, and needs memory for N buffers.
    Time: 2 alpha + 2(N-1)M / B + (N-1)M gamma (alpha: latency, B: bytes a second, gamma: seconds to add a byte), and one
    copy of M bytes within memory; as ``p.grad`` becomes a view of the buffer (common/sync/flat_buffer.py), none back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers = FlatBuffers()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for buffer in self._buffers.of(self.exchanged()):
            mine = buffer.collect(divisor=size)
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else []
            dist.gather(mine, gathered or None, dst=0)
            for other in gathered[1:]:
                gathered[0] += other
            dist.scatter(mine, [gathered[0]] * size if rank == 0 else None, src=0)
