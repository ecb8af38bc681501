"""PyTorch's DistributedDataParallel: buckets of gradients, sent while backward still computes the others."""

import warnings
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.sync.base import GradientSync, broadcast_from_rank0
from common.sync.bucket_plans import DDPPlan


class DDP(DDPPlan, GradientSync):
    """DistributedDataParallel hooks into backward, so that ``synchronize`` has nothing left to do.

    With N ranks and M bytes of gradients in K buckets (for VGG-11 three: 9.5, 27.2 and 0.3 MB), per step, as a ring:
    every rank sends 2(N-1)K messages, 2(N-1)/N M bytes, and receives as many.
    Time: that of the last bucket, plus what backward was too short to hide of the others:
    c_k = max(r_k, c_{k-1}) + 2(N-1) alpha + 2(N-1)/N M_k / B, where r_k is when bucket k is ready and c_K the end.
    The first step, in which torch learns the order of backward, sends all in one bucket.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: torch's default, 1 in the first, then 25 (common/sync/bucketing.py).
    find_unused_parameters : let DDP look for parameters that a forward pass left out: costs a walk of the graph, one more
        ``all_reduce`` of 4 bytes a parameter, and buckets in the order of the parameters.
    """

    def __init__(
        self, *, bucket_mb: float | None = None, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(bucket_mb=bucket_mb, find_unused_parameters=find_unused_parameters)
        self._wrapped: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model inside DistributedDataParallel; a model that is wrapped already is kept."""
        self._wrapped, _ = wrap(
            model,
            self._wrapped,
            bucket_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
        )
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class."""
        assert self._wrapped is not None, "prepare comes first"
        return self._wrapped.no_sync()


def wrap(
    model: nn.Module,
    wrapped: DistributedDataParallel | None,
    *,
    bucket_mb: float | None,
    find_unused_parameters: bool,
) -> tuple[DistributedDataParallel, bool]:
    """Return the model inside DistributedDataParallel, and whether it was not yet what ``wrapped`` is; every rank gets
    rank 0's parameters and buffers."""
    if wrapped is not None and model in (wrapped, wrapped.module):
        return wrapped, False
    if isinstance(model, DistributedDataParallel):
        return model, True
    # With broadcast_buffers=False DDP leaves the buffers alone at its start, too.
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
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
        ), True
