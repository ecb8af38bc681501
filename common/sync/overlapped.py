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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.errors import UserError
from common.sync.base import GradientSync
from common.sync.bucket_plans import OverlappedPlan
from common.sync.bucketing import assign_buckets
from common.sync.flat_buffer import FlatBuffer
from common.sync.message_cost import GradientSize


class Overlapped(OverlappedPlan, GradientSync):
    """Hooks that fill and send the buckets.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1 for the first, then 25, as in
        DistributedDataParallel.
    """

    _accumulating = False
    _hooks: Sequence[Any] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self.close()
        self._works: list[dist.Work] = []
        self._missing: set[nn.Parameter] = set()  # whose gradient is in no bucket yet, this step
        return super().prepare(model, optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See the base class; the hooks do nothing meanwhile."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        parameters = self.exchanged()
        if not self._buffers:
            self._make_buckets(parameters)
        # Gradients that no hook has copied: all in the first step, later those of unused
        # parameters.
        for bucket in self._buffers:
            for parameter in self._missing.intersection(bucket.parameters):
                bucket.take(parameter, divisor=dist.get_world_size())
        self._missing.clear()
        self._send_full_buckets()
        for work in self._works:
            work.wait()
        self._works, self._missing = [], set(parameters)

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        ready_order = parameters[::-1]  # backward computes the last layer's gradients first
        shares = assign_buckets(GradientSize.of(ready_order), self.bucket_mb)
        self._buffers = [FlatBuffer([ready_order[i] for i in share]) for share in shares]
        self._missing = set(parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
            for bucket in self._buffers
            for parameter in bucket.parameters
        ]

    def _gradient_ready(self, bucket: FlatBuffer, parameter: nn.Parameter) -> None:
        if self._accumulating:
            return
        if parameter not in self._missing:
            raise UserError(
                "a parameter got a second gradient in one step, after the first one may have been "
                "sent: put backward passes that do not end a step inside the strategy's no_sync()"
            )
        bucket.take(parameter, divisor=dist.get_world_size())
        self._missing.remove(parameter)
        self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        # One work handle per bucket in flight. A full bucket waits for those before it, so that
        # all ranks send the same buckets in the same order.
        for bucket in self._buffers[len(self._works) :]:
            if not self._missing.isdisjoint(bucket.parameters):
                break
            self._works.append(dist.all_reduce(bucket.tensor, async_op=True))

    def close(self) -> None:
        """See the base class."""
        for hook in self._hooks:
            hook.remove()
