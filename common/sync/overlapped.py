"""Buckets by hand: each is sent as soon as backward has filled it, while backward continues.

    backward   ####################################
    bucket 1            ========                      sent while backward computes the rest
    bucket 2                        ==============
    bucket 3                                       =  only what comes after backward costs time

A hook on each parameter copies its gradient into a bucket. A full bucket goes into an asynchronous
``all_reduce``, in the same order on every rank; ``synchronize`` waits for all of them.

Sends: every rank, rank 0 included, 2(N-1)K messages, 2(N-1)/N M bytes, for K buckets, and receives
    as much. VGG-11 has three buckets, of 9.5, 27.2 and 0.3 MB.
Time: what backward does not hide. Bucket k, of M_k bytes, is full at r_k and summed at
    c_k = max(r_k, c_(k-1)) + 2(N-1) alpha + 2(N-1)/N M_k / B + (N-1)/N M_k gamma. The exposed time
    is c_K minus the end of backward. Each c_k also includes copying M_k bytes in memory; nothing is
    copied back (flat_buffer.py). The first step, in which the ranks agree on their gradients,
    sends all buckets after backward. [Li et al., PyTorch Distributed, arXiv:2006.15704]
Common mistake: sending each bucket when it is full on this rank. Another rank may fill its
    buckets in another order, and then gradients of different parameters are added up.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buckets.
"""

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.sync.backward_buckets import BackwardBuckets
from common.sync.base import GradientSync
from common.sync.bucketing import buckets_in_ready_order
from common.sync.flat_buffer import FlatBuffer
from common.sync.plans.buckets import OverlappedPlan


class Overlapped(GradientSync):
    """Hooks that fill and send the buckets."""

    plan: OverlappedPlan

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self.close()
        self._works: list[dist.Work] = []
        return super().prepare(model, optimizer)

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        parameters = self.exchanged()
        if self._filling is None:
            self._buffers = [
                FlatBuffer(part) for part in buckets_in_ready_order(parameters, self.plan.bucket_mb)
            ]
            self._filling = BackwardBuckets(self._buffers, self._send, self._not_on_all_ranks)
            self._hooks = self._filling.hooks
        self._filling.finish()
        for work in self._works:
            work.wait()
        self._works = []

    def _send(self, index: int) -> None:
        self._works.append(dist.all_reduce(self._buffers[index].tensor, async_op=True))
