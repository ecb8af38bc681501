"""DistributedDataParallel with PowerSGD, torch's hook: each gradient as a product of two thin matrices."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.sync.bucket_plans import DDPPowerSGDPlan
from common.sync.ddp import wrap
from common.sync.powersgd_state import PerParameterState

_ONE_BUCKET_MB = 2**20


class DDPPowerSGD(DDPPowerSGDPlan, GradientSync):
    """A gradient of shape (n, m, ...), with its error of the step before, becomes P Q^T of rank r: P = G Q is summed and
    made orthogonal, Q = G^T P summed and kept for the next step, G - P Q^T kept as the error. Vectors, and what is too
    small to gain by it, are summed as they are. All in one bucket: so little is sent that its messages' latency counts.

    What it keeps: the mean over the ranks of errors before + gradients = that of errors after, + what the optimiser gets:
    no gradient is lost, only late. All ranks get the same bits.
    The first two steps are plain ``ddp`` in one bucket. From then on, with N ranks, U bytes of what stays as it is, and P
    and Q bytes of thin matrices, per step, as rings: every rank sends 6(N-1) messages, 2(N-1)/N (U + P + Q) bytes, and
    receives as many. For VGG-11 with r = 2, U + P + Q = 0.22 MB of 36.9.
    Time: 6(N-1) alpha + 2(N-1)/N (U + P + Q) / B, nothing of it during backward, and the products, each twice over all M
    bytes (alpha: latency, B: bytes a second).

    Parameters
    ----------
    powersgd_rank : r, the columns of P and Q.
    find_unused_parameters : as that of ``ddp``.
    """

    exact = False

    def __init__(self, *, powersgd_rank: int = 2, find_unused_parameters: bool = False) -> None:
        super().__init__(powersgd_rank=powersgd_rank, find_unused_parameters=find_unused_parameters)
        self._wrapped: DistributedDataParallel | None = None
        self._per_parameter: PerParameterState | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model inside DistributedDataParallel, with the hook."""
        self._wrapped, is_new = wrap(
            model,
            self._wrapped,
            bucket_mb=_ONE_BUCKET_MB,
            find_unused_parameters=self.find_unused_parameters,
        )
        if is_new:
            self._per_parameter = PerParameterState(self._wrapped.module, rank=self.powersgd_rank)
            self._wrapped.register_comm_hook(self._per_parameter, _hook)
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class."""
        assert self._wrapped is not None, "prepare comes first"
        return self._wrapped.no_sync()

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        assert self._per_parameter is not None, "prepare comes first"
        return self._per_parameter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class; after ``prepare``."""
        assert self._per_parameter is not None, "prepare comes first"
        self._per_parameter.load_state_dict(state)


def _hook(
    per_parameter: PerParameterState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    per_parameter.arrange(bucket)
    return powerSGD_hook(per_parameter.state, bucket)
