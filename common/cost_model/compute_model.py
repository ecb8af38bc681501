"""How long a rank computes, and when backward has made each gradient. Imports no torch.

``ComputeModel.at`` returns the ``StepCompute`` of one rank's step; common/cost_model/event_model.py
adds the messages.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SAMPLES = 2  # per rank: BatchNorm needs two, and training refuses fewer


@dataclass(frozen=True)
class StepCompute:
    """One rank's step without messages: data and forward ("before"), backward, and update.

    ``ready_bytes`` counts, rising, the bytes of gradients made so far; ``ready_shares`` holds the
    share of backward after which each count is reached. Backward makes the gradients in the reverse
    order of the parameters.
    """

    before_seconds: float
    backward_seconds: float
    update_seconds: float
    ready_bytes: Sequence[int] = ()
    ready_shares: Sequence[float] = ()

    @property
    def seconds(self) -> float:
        """The whole step without messages."""
        return self.before_seconds + self.backward_seconds + self.update_seconds

    def ready_seconds(self, nbytes: int) -> float:
        """Return the seconds of backward until ``nbytes`` bytes of gradients are made."""
        index = bisect.bisect_left(self.ready_bytes, nbytes)
        share = self.ready_shares[index] if index < len(self.ready_shares) else 1.0
        return share * self.backward_seconds


@dataclass(frozen=True)
class ComputeProfile:
    """Step times of ``ranks`` ranks on one machine at once, with ``threads`` threads each.

    Data and forward ("before") and backward each take ``fixed_seconds`` + ``sample_seconds`` x the
    rank's samples. The update takes ``update_seconds``, whatever the batch.
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
    """Profiles by rising number of ranks, and the order in which gradients become ready."""

    profiles: tuple[ComputeProfile, ...]
    ready_bytes: tuple[int, ...] = ()
    ready_shares: tuple[float, ...] = ()

    def at(self, samples: float, *, ranks_here: int = 1) -> StepCompute:
        """Return the step of a rank with ``samples`` samples, one of ``ranks_here`` on its machine.

        Between two profiles, the machine's time for a sample is interpolated over the logarithm of
        the ranks. Beyond the last profile it stays the same: ranks that share cores take turns.
        """
        ranks = [profile.ranks for profile in self.profiles]
        above = bisect.bisect_right(ranks, ranks_here)
        low, high = self.profiles[max(0, above - 1)], self.profiles[min(above, len(ranks) - 1)]
        between = low.ranks < ranks_here < high.ranks
        # 0 at low, 1 at high
        share = math.log(ranks_here / low.ranks, high.ranks / low.ranks) if between else 0.0

        def fixed(first: float, second: float) -> float:
            return max(1.0, ranks_here / ranks[-1]) * (first + share * (second - first))

        def shared(first: float, second: float) -> float:
            # A rank's time grows with the ranks that share the cores; the machine's time, first /
            # ranks, hardly does.
            return ranks_here * ((1 - share) * first / low.ranks + share * second / high.ranks)

        return StepCompute(
            fixed(low.before_fixed_seconds, high.before_fixed_seconds)
            + samples * shared(low.before_sample_seconds, high.before_sample_seconds),
            fixed(low.backward_fixed_seconds, high.backward_fixed_seconds)
            + samples * shared(low.backward_sample_seconds, high.backward_sample_seconds),
            shared(low.update_seconds, high.update_seconds),
            self.ready_bytes,
            self.ready_shares,
        )


def local_samples(batch_size: int, nodes: int, *, scaling: str) -> int:
    """Return the samples of the busiest rank, at least two.

    scaling : "strong" divides a global batch of ``batch_size`` over the nodes, "weak" gives every
        node that many.
    """
    return max(LEAST_SAMPLES, batch_size if scaling == "weak" else -(-batch_size // nodes))
