"""DistributedDataParallel that sends half of the bytes: torch's fp16 hook."""

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.sync.bucket_plans import DDPFp16Plan
from common.sync.ddp import wrap


class DDPFp16(DDPFp16Plan, GradientSync):
    """As ``ddp``, but each bucket is divided by N, rounded to fp16, and summed in fp16.

    What it keeps: each entry lies within the rounding of fp16 (11 bits) of the exact mean, on all ranks the same bits.
    Entries beyond 65,504 become infinite, those below 6e-8 zero; hence no loss scaling on top.
    With N ranks and M bytes of fp32 gradients in K buckets, per step, as a ring: every rank sends 2(N-1)K messages,
    (N-1)/N M bytes, and receives as many.
    Time: as ``ddp``, with M_k / 2 for M_k, and two more passes over memory for the rounding.

    Parameters
    ----------
    bucket_mb, find_unused_parameters : as those of ``ddp``.
    """

    exact = False

    def __init__(
        self, *, bucket_mb: float | None = None, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(bucket_mb=bucket_mb, find_unused_parameters=find_unused_parameters)
        self._wrapped: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model inside DistributedDataParallel, with the hook."""
        self._wrapped, is_new = wrap(
            model,
            self._wrapped,
            bucket_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
        )
        if is_new:
            self._wrapped.register_comm_hook(None, fp16_compress_hook)
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class."""
        assert self._wrapped is not None, "prepare comes first"
        return self._wrapped.no_sync()
