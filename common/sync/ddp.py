"""PyTorch's DistributedDataParallel: buckets of gradients, sent while backward continues.

    backward   ####################################
    bucket 1            ========                      sent while backward computes the rest
    bucket 2                        ==============
    bucket 3                                       =  only what comes after backward costs time

overlapped.py does the same by hand.

Sends: every rank, rank 0 included, 2(N-1)K messages, 2(N-1)/N M bytes, for K buckets, and receives
    as much. VGG-11 has three buckets, of 9.5, 27.2 and 0.3 MB. In the first step torch learns
    the order of backward and sends all in one bucket. ``find_unused_parameters`` adds an
    ``all_reduce`` of 4 bytes a parameter.
Time: what backward does not hide. Bucket k, of M_k bytes, is full at r_k and summed at
    c_k = max(r_k, c_(k-1)) + 2(N-1) alpha + 2(N-1)/N M_k / B + (N-1)/N M_k gamma. The exposed time
    is c_K minus the end of backward. Each c_k also includes copying M_k bytes in memory.
    [Li et al., PyTorch Distributed, arXiv:2006.15704]
Common mistake: calling the model itself instead of the wrapped one. The hooks then do nothing, and
    each rank trains by itself. Another: evaluating the wrapped model on rank 0 alone: by default
    its forward broadcasts the buffers, so it hangs.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.)
"""

import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.errors import UserError
from common.sync.base import GradientSync, broadcast_from_rank0
from common.sync.plans.buckets import DDPPlan
from common.sync.plans.lossy import DDPPowerSGDPlan

ONE_BUCKET_MB = 2**20  # more than any model has


class DDPWrapper(GradientSync):
    """Base class of the strategies that use DistributedDataParallel.

    Its hooks send the gradients during backward, so ``synchronize`` has nothing to do.
    """

    plan: DDPPlan | DDPPowerSGDPlan
    _wrapped: Any = None  # the model in DistributedDataParallel, after ``prepare``

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Wrap the model in DistributedDataParallel; a wrapped model stays as it is.

        Every rank gets rank 0's parameters and buffers.
        """
        if self._wrapped is not None and model in (self._wrapped, self._wrapped.module):
            return self._wrapped
        self._wrapped = model if isinstance(model, DistributedDataParallel) else self._wrap(model)
        self._sent = [p for p in self._wrapped.parameters() if p.requires_grad]
        self.attach_hook(self._wrapped)
        return self._wrapped

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        # broadcast_buffers=False, since the engine averages BatchNorm's statistics over the ranks.
        # Then DDP does not copy the buffers at the start either, so they are copied here.
        broadcast_from_rank0(list(model.buffers()))
        device = next(model.parameters()).device
        with warnings.catch_warnings():
            # torch 2.15 has another name for broadcast_buffers, which torch 2.11 does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # PowerSGD has no such option: it takes all gradients in one bucket.
                bucket_cap_mb=getattr(self.plan, "bucket_mb", ONE_BUCKET_MB),
                find_unused_parameters=self.plan.find_unused_parameters,
            )

    def attach_hook(self, wrapped: DistributedDataParallel) -> None:
        """Replace the plain all_reduce of each bucket, if the strategy does."""

    def synchronize(self, model: nn.Module) -> None:
        """Check that every gradient was there to send; UserError names those that were not."""
        if all(p.grad is not None for p in self._sent) or self._wrapped.find_unused_parameters:
            return
        named = self._wrapped.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        shown = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
        raise UserError(
            f"{len(unused)} parameters have no gradient, which other ranks wait for: {shown}. "
            "Freeze them with requires_grad_(False), let the loss use them, or choose another "
            "strategy, e.g. all_reduce, or in Python "
            'sync=build_sync("ddp", find_unused_parameters=True) of common.sync'
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class."""
        return self._wrapped.no_sync()


class DDP(DDPWrapper):
    """Plain DistributedDataParallel."""
