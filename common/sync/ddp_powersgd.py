"""DistributedDataParallel with PowerSGD, torch's hook: each gradient as a product of thin matrices.

    gradient + error   n x m  =  P (n x r) times Q^T (r x m)  +  new error
    every rank:  P = G Q --all_reduce--> make orthogonal --> Q = G^T P --all_reduce--> G' = P Q^T

G is a gradient of shape (n, m, ...) as a matrix, plus its error of the step before. G - P Q^T is
the error of this step, and the next step starts with this step's Q. Vectors, and matrices that
would not shrink below half, are summed uncompressed. All gradients share one bucket: with so few
bytes, message latency dominates.

It is lossy. What it keeps: the mean over the ranks of (errors before + gradients) equals the mean
    of (errors after) + what the optimiser gets. No gradient is lost, some come late. All ranks
    have the same bits.
Sends: from the third step on every rank, rank 0 included, 6(N-1) messages, 2(N-1)/N (U + P + Q)
    bytes, and receives as much. U is the bytes of the uncompressed gradients, P and Q are those of
    the thin matrices. For VGG-11 with r = 2, U + P + Q is 0.22 MB of 36.9. The first two steps are
    plain ``ddp`` with one bucket.
Time: 6(N-1) alpha + 2(N-1)/N (U + P + Q) / B + ((N-1)/N (U + P + Q) + 2M) gamma, two copies of M
    bytes in memory, and the products G Q and G^T P. None of this overlaps with backward.
    [Vogels et al., arXiv:1905.13727]
Common mistake: dropping the error instead of adding it to the next gradient: what r columns cannot
    hold is then lost in every step.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.)
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from common.sync.bucket_plans import DDPPowerSGDPlan
from common.sync.ddp import DDPWrapper
from common.sync.powersgd_state import PerParameterState


class DDPPowerSGD(DDPPowerSGDPlan, DDPWrapper):
    """As ``ddp``, with torch's PowerSGD hook on one bucket.

    Parameters
    ----------
    powersgd_rank : r, the columns of P and Q.
    find_unused_parameters : as that of ``ddp``.
    """

    exact = False
    bucket_mb = 2**20  # more than any model has

    def attach_hook(self, wrapped: DistributedDataParallel) -> None:
        """See the base class."""
        self._per_parameter = PerParameterState(wrapped.module, rank=self.powersgd_rank)
        wrapped.register_comm_hook(self._per_parameter, PerParameterState.exchange)

    def state_dict(self) -> dict[str, Any]:
        """See the base class; after ``prepare``."""
        return self._per_parameter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class; after ``prepare``."""
        self._per_parameter.load_state_dict(state)
