"""all_reduce of one flat buffer: the latency of one message in place of one a parameter."""

import torch.distributed as dist
from torch import nn

from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_plans import AllReduceFlatPlan


class AllReduceFlat(AllReduceFlatPlan, GradientSync):
    """All gradients go into one buffer (one a type), and one ``all_reduce`` sums it.

    With N ranks and M bytes of gradients, per step, as a ring: every rank, the root too, sends 2(N-1) messages,
    2(N-1)/N M bytes, and receives as many.
    Time: 2(N-1) alpha + 2(N-1)/N M / B (alpha: latency, B: bytes a second), and one copy of M bytes within memory; as
    ``p.grad`` becomes a view of the buffer (common/sync/flat_buffer.py), none back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers = FlatBuffers()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for buffer in self._buffers.of(self.exchanged()):
            dist.all_reduce(buffer.collect(divisor=dist.get_world_size()), op=dist.ReduceOp.SUM)
