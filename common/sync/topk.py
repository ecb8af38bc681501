"""Only the gradient's largest entries; what is not sent now is added to the next gradient.

    each rank:   gradient + residual = largest k entries + rest --> residual of the next step
                                               |
    all_gather (a ring) brings the k values and k indices of every rank to all; each adds them up

It is lossy. What it keeps: over all ranks, residuals before + gradients = residuals after + N
    times the mean. No gradient is lost, some come late. With ``topk_ratio`` 1 it equals
    ``all_reduce``.
Sends: k = ceil(topk_ratio n) of n entries of 4 bytes, each with an index of 4 bytes. Every rank
    sends 2(N-1) messages, 8(N-1)k bytes, and receives as much. These are fewer bytes than a
    ring's only if topk_ratio < 1/N.
Time: 2(N-1) alpha + 8(N-1)k / B + 4Nk gamma, and the residual and the search for the k largest of
    M bytes, which takes longer than adding all n. [Stich et al., arXiv:1809.07599]
Common mistake: dropping what is not sent, so that small gradients never arrive. Another: dividing
    each entry by the number of ranks that sent it instead of by N.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.plans.lossy import TopKPlan


class TopK(GradientSync):
    """Values and indices of the largest entries, by absolute value over the whole model."""

    plan: TopKPlan
    exact = False
    _residuals: Sequence[Tensor] = ()

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        means = self.flat_gradients(divisor=1)  # (entries,) each; still this rank's gradients
        self._residuals = self._residuals or [torch.zeros_like(mean) for mean in means]
        for mean, residual in zip(means, self._residuals, strict=True):
            residual += mean
            mean_of_largest(residual, mean, count=self.plan.count(len(residual)))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {"residuals": [residual.cpu().clone() for residual in self._residuals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class; after ``prepare``. ValueError if the residuals fit no gradients."""
        residuals = state.get("residuals", [])
        parameters = list(self._parameters.values())
        entries = sum(r.numel() for r in residuals)
        most = sum(p.numel() for p in parameters)
        if entries > most or any(r.dim() != 1 or not r.is_floating_point() for r in residuals):
            raise ValueError(f"the residuals have {entries} entries, the gradients {most}")
        self._residuals = [r.detach().clone().to(parameters[0].device) for r in residuals]


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest entries of a vector.

    On a CPU, numpy's partition takes a third of the time of torch's ``topk``. NaN counts as large.
    """
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:  # which numpy lacks
        return torch.from_numpy(np.argpartition(values.numpy(), -count)[-count:])
    return values.topk(count, sorted=False).indices


def mean_of_largest(residual: Tensor, mean: Tensor, *, count: int) -> None:
    """Exchange the ``count`` largest entries of every rank; write their mean into ``mean``.

    ``residual``, ``mean`` : vectors of one length. The entries that were sent become zero in
    ``residual``.
    """
    size = dist.get_world_size()
    indices = largest(residual.abs(), count)
    values = residual[indices]
    short = indices.to(torch.int32)  # for less than 2**31 entries, see INDEX_BYTES
    all_values = [torch.empty_like(values) for _ in range(size)]  # N vectors of ``count`` entries
    all_indices = [torch.empty_like(short) for _ in range(size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, short)

    residual[indices] = 0
    mean.zero_()
    # Every rank adds in the same order, so all ranks get the same bits.
    for theirs, where in zip(all_values, all_indices, strict=True):
        mean.index_add_(0, where, theirs)
    mean /= size
