"""PyTorch's DistributedDataParallel: buckets of gradients, sent while backward still computes the others."""

import warnings
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.sync.base import GradientSync, broadcast_from_rank0


class DDP(GradientSync):
    """DistributedDataParallel hooks into backward, so that ``synchronize`` has nothing left to do.

    With N ranks and M bytes of gradients in K buckets (for VGG-11 three: 9.5, 27.2 and 0.3 MB), per step, as a ring:
    every rank sends 2(N-1)K messages, 2(N-1)/N M bytes, and receives as many.
    Time: that of the last bucket, plus what backward was too short to hide of the others:
    c_k = max(r_k, c_{k-1}) + 2(N-1) alpha + 2(N-1)/N M_k / B, where r_k is when bucket k is ready and c_K the end.

    Parameters
    ----------
    find_unused_parameters : let DDP look for parameters that a forward pass left out (costs a walk of the graph).
    """

    def __init__(self, *, find_unused_parameters: bool = False) -> None:
        super().__init__()
        self._find_unused_parameters = find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model inside DistributedDataParallel; a model that is wrapped already is kept."""
        if isinstance(model, DistributedDataParallel):
            self._wrapped = model
        if self._wrapped is not None and model in (self._wrapped, self._wrapped.module):
            return self._wrapped
        # With broadcast_buffers=False DDP leaves the buffers alone at its start, too.
        broadcast_from_rank0(list(model.buffers()))
        device = next(model.parameters()).device
        with warnings.catch_warnings():
            # torch 2.15 has another name for broadcast_buffers, which torch 2.11 does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._wrapped = DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False,
                gradient_as_bucket_view=True, find_unused_parameters=self._find_unused_parameters)
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class."""
        assert self._wrapped is not None, "prepare comes first"
        return self._wrapped.no_sync()
