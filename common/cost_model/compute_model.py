"""How long a rank computes: seconds of a step by its samples, and when in backward each gradient is ready. No torch here.

``ComputeModel.at`` gives the ``StepCompute`` of one rank's step, which common/cost_model/event_model.py puts beside the messages.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SAMPLES = 2
"""BatchNorm needs two samples a rank, so a training with fewer is refused."""


@dataclass(frozen=True)
class StepCompute:
    """One rank's step without messages: seconds before backward (data and forward), of backward, of the update.

    ``ready_bytes`` are the bytes of gradients that backward has made, cumulative and rising, ``ready_shares`` the shares of
    backward after which it has: backward goes through the parameters in reversed order.
    """

    before_seconds: float
    backward_seconds: float
    update_seconds: float
    ready_bytes: Sequence[int] = ()
    ready_shares: Sequence[float] = ()

    @property
    def seconds(self) -> float:
        """The whole step, where it is alone."""
        return self.before_seconds + self.backward_seconds + self.update_seconds

    def ready_seconds(self, nbytes: int) -> float:
        """Return how long after the beginning of backward it has made so many bytes of gradients."""
        index = bisect.bisect_left(self.ready_bytes, nbytes)
        share = self.ready_shares[index] if index < len(self.ready_shares) else 1.0
        return share * self.backward_seconds


@dataclass(frozen=True)
class ComputeProfile:
    """What was measured with ``ranks`` ranks that compute on one machine at once, ``threads`` threads each.

    Each section of a step is a line over the rank's samples: ``fixed_seconds`` + ``sample_seconds`` x samples; the update
    takes ``update_seconds`` whatever the batch.
    """

    ranks: int
    threads: int
    before_fixed_seconds: float
    before_sample_seconds: float
    backward_fixed_seconds: float
    backward_sample_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class ComputeModel:
    """Profiles by the number of ranks that share the machine, rising, and the order in which gradients come."""

    profiles: tuple[ComputeProfile, ...]
    ready_bytes: tuple[int, ...] = ()
    ready_shares: tuple[float, ...] = ()

    def at(self, samples: float, *, ranks_here: int = 1) -> StepCompute:
        """Return the step of a rank with so many samples, where ``ranks_here`` ranks compute on its machine at once.

        Between two profiles the time that the machine takes for a sample is interpolated over the logarithm of the ranks;
        beyond the last one it stays, so that ranks that share cores take turns.
        """
        low, high, share = self._around(ranks_here)

        def between(name: str) -> float:
            first, second = getattr(low, name), getattr(high, name)
            if name.endswith("fixed_seconds"):
                return first + share * (second - first)
            return ranks_here * ((1 - share) * first / low.ranks + share * second / high.ranks)

        crowd = max(1.0, ranks_here / self.profiles[-1].ranks)
        return StepCompute(
            crowd * between("before_fixed_seconds") + samples * between("before_sample_seconds"),
            crowd * between("backward_fixed_seconds")
            + samples * between("backward_sample_seconds"),
            between("update_seconds"),
            self.ready_bytes,
            self.ready_shares,
        )

    def _around(self, ranks_here: int) -> tuple[ComputeProfile, ComputeProfile, float]:
        """The profiles below and above, and how far from the first to the second."""
        ranks = [profile.ranks for profile in self.profiles]
        above = min(bisect.bisect_left(ranks, ranks_here), len(ranks) - 1)
        below = above if ranks[above] <= ranks_here or above == 0 else above - 1
        if below == above:
            return self.profiles[above], self.profiles[above], 0.0
        share = math.log(ranks_here / ranks[below]) / math.log(ranks[above] / ranks[below])
        return self.profiles[below], self.profiles[above], share


def local_samples(batch_size: int, nodes: int, *, scaling: str) -> int:
    """Return the samples of the busiest rank: of a global batch ("strong") or of a batch a node ("weak"), two at least."""
    return max(LEAST_SAMPLES, batch_size if scaling == "weak" else -(-batch_size // nodes))
