"""The largest entries of the gradient alone, with error feedback: what is not sent now is added to the next gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import UserError
from common.sync.base import GradientSync
from common.sync.flat_buffer import FlatBuffers
from common.sync.message_plans import TopKPlan, index_bytes

_STRIDE = 101


class TopK(TopKPlan, GradientSync):
    """Each rank adds its gradient to its residual, sends the largest ``topk_ratio`` of the sum's entries, by absolute value
    over the whole model, and keeps the others as its residual; ``all_gather`` of values and indices, added up in rank order.

    What it keeps: over all ranks, residuals before + gradients = residuals after + N times the mean, so that no gradient is
    lost, only late. With ``topk_ratio`` 1 it is ``all_reduce``.
    With N ranks and n entries of 4 bytes, k = ceil(topk_ratio n): per step every rank sends 2(N-1) messages, 8(N-1)k bytes,
    and receives as many: fewer than a ring only where topk_ratio < 1/N.
    Time: 2(N-1) alpha + 8(N-1)k / B + 4Nk gamma (alpha: latency, B: bytes a second, gamma: seconds to add a byte), and
    finding the k largest, which takes longer than adding all n.

    Parameters
    ----------
    topk_ratio : share of the entries that is sent, above 0, at most 1.
    """

    exact = False

    def __init__(self, *, topk_ratio: float = 0.01) -> None:
        super().__init__(topk_ratio=topk_ratio)
        self._buffers = FlatBuffers()
        self._residuals: list[Tensor] = []

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        buffers_now = self._buffers.of(self.exchanged())
        if not self._residuals:
            self._residuals = [torch.zeros_like(buffer.tensor) for buffer in buffers_now]
        if [r.shape for r in self._residuals] != [b.tensor.shape for b in buffers_now]:
            raise UserError(
                "topk: the checkpoint's residual is of other gradients than this model's: resume with the "
                "model that it was saved with"
            )
        for buffer, residual in zip(buffers_now, self._residuals, strict=True):
            residual += buffer.collect(divisor=1)
            mean_of_largest(residual, buffer.tensor, count=self.count(residual.numel()))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {"residuals": [residual.cpu().clone() for residual in self._residuals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class."""
        device = next((p.device for p in self._parameters.values()), None)
        self._residuals = [
            residual.detach().clone().to(device) for residual in state.get("residuals", [])
        ]


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest of a vector. From a sample of a long one follows a bound that some more
    of them reach, so that only these must be sorted: a quarter of the time."""
    sample = values[::_STRIDE]
    expected = int(1.15 * count / _STRIDE) + 200
    if expected < len(sample):
        candidates = (
            (~(values < sample.topk(expected, sorted=False).values.min())).nonzero().view(-1)
        )
        if len(candidates) >= count:
            return candidates[values[candidates].topk(count, sorted=False).indices]
    return values.topk(count, sorted=False).indices


def mean_of_largest(residual: Tensor, mean: Tensor, *, count: int) -> None:
    """Put the mean over the ranks of each one's ``count`` largest entries of ``residual`` in ``mean``, and zero them there."""
    size = dist.get_world_size()
    indices = largest(residual.abs(), count)
    index_type = torch.int32 if index_bytes(len(residual)) == 4 else torch.int64
    values, short = residual[indices], indices.to(index_type)
    all_values = [torch.empty_like(values) for _ in range(size)]
    all_indices = [torch.empty_like(short) for _ in range(size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, short)
    residual[indices] = 0
    mean.zero_()
    for theirs, where in zip(
        all_values, all_indices, strict=True
    ):  # rank by rank: equal bits everywhere
        mean.index_add_(0, where, theirs)
    mean /= size
