"""How long a rank computes, and when backward has made each gradient. Imports no torch.

``ComputeModel.at`` returns the ``StepCompute`` of one rank's step; lab/predict/event_model.py
adds the messages.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta

from common.sync.plans.base import MessagePlan
from common.utils.typed_json import Count, Ranks, Share

LEAST_SECONDS = 1e-9  # of a step's forward and backward
PartSeconds = Annotated[float, Meta(ge=0, le=1e4)]
# Bytes that an update reads and writes for each parameter: fp32 weights, gradients and state. LAMB
# passes its update three times, for norms and the step.
OPTIMIZERS = {"sgd": 12, "momentum": 20, "adam": 28, "lamb": 48}
MOST_UPDATE = 0.75  # of a step
LEAST_SAMPLES = 2  # per rank, of a model with BatchNorm: training refuses fewer


class Wait(NamedTuple):
    """A wait of ``seconds`` once a pass has computed that share of its own time."""

    share: float
    seconds: float


@dataclass(frozen=True)
class StepCompute:
    """One rank's step without messages: data and forward ("before"), backward, and update.

    ``passes`` : micro-batches whose gradients add up before the update (accumulation). Seconds,
    shares and waits of "before" and of backward are those of each one.

    ``ready_bytes`` counts, rising, the bytes of gradients made so far; ``ready_shares`` holds the
    share of backward after which each count is reached. Backward makes the gradients in the reverse
    order of the parameters.

    ``needed_shares`` holds, for each of these counts, the share of "before" after which forward
    first uses one of their parameters. Without it forward is the mirror image of backward, and data
    counts as a part of it: 1 - ``ready_shares``.

    ``waits_for`` has the messages for which layers wait, whatever the strategy (SyncBatchNorm's);
    ``forward_waits`` and ``backward_waits`` say when and for how long. They are no part of the
    seconds above. ``lab.predict.event_model.with_waits`` sets all three. ``alone`` is the step of a
    rank that waits for no slower one, if the seconds above are those of the slowest.
    ``update_ranks`` : ranks of the node whose measured step these seconds are; a strategy that
    shards the update shared it out among them.
    """

    before_seconds: float
    backward_seconds: float
    update_seconds: float
    ready_bytes: Sequence[int] = ()
    ready_shares: Sequence[float] = ()
    needed_shares: Sequence[float] = ()
    waits_for: MessagePlan | None = None
    alone: "StepCompute | None" = None
    forward_waits: Sequence[Wait] = ()
    backward_waits: Sequence[Wait] = ()
    passes: int = 1
    update_ranks: int = 1

    @classmethod
    def of_layers(
        cls,
        before_seconds: float,
        ready: Mapping[str, float],
        update_seconds: float,
        sizes: Mapping[str, int],
        *,
        needed: Mapping[str, float] | None = None,
    ) -> "StepCompute":
        """Return the step whose backward makes each gradient after the seconds in ``ready``.

        sizes : bytes of the gradients, by name, in the order of the parameters. needed : seconds of
        "before" until forward uses each parameter; None: see ``needed_shares``.
        """
        backward = max(ready.values())  # seconds
        in_turn = list(sizes)[::-1]
        ready_shares = [ready[name] / backward for name in in_turn]
        needed_shares = []
        if needed:
            needed_shares = [needed[name] / before_seconds for name in in_turn]
        # A count is reached with the latest of its gradients, and needed with the earliest of its
        # parameters.
        return cls(
            before_seconds,
            backward,
            update_seconds,
            ready_bytes=tuple(accumulate(sizes[name] for name in in_turn)),
            ready_shares=tuple(accumulate(ready_shares, max)),
            needed_shares=tuple(accumulate(needed_shares, min)),
        )

    @property
    def seconds(self) -> float:
        """The whole step without messages."""
        return self.passes_seconds + self.update_seconds

    @property
    def passes_seconds(self) -> float:
        """The passes of all micro-batches, without waits."""
        return self.passes * (self.before_seconds + self.backward_seconds)

    @property
    def wait_seconds(self) -> float:
        """How long layers wait for messages, in both passes of every micro-batch."""
        waited = _waited(self.forward_waits, 1.0) + _waited(self.backward_waits, 1.0)
        return self.passes * waited

    @property
    def forward_end(self) -> float:
        """The seconds of "before", waits included."""
        return self.before_seconds + _waited(self.forward_waits, 1.0)

    @property
    def backward_end(self) -> float:
        """The seconds of backward, waits included."""
        return self.backward_seconds + _waited(self.backward_waits, 1.0)

    def ready_share(self, nbytes: int) -> float:
        """Return the share of backward after which ``nbytes`` bytes of gradients are made."""
        index = bisect.bisect_left(self.ready_bytes, nbytes)
        if index == len(self.ready_shares):
            return 1.0
        return self.ready_shares[index]

    def needed_share(self, nbytes: int) -> float:
        """Return the share of "before" until forward uses a parameter beyond ``nbytes`` bytes."""
        if not self.ready_bytes:
            return 0.0
        # ``ready_bytes`` counts from the last parameter on.
        index = bisect.bisect_left(self.ready_bytes, self.ready_bytes[-1] - nbytes)
        if self.needed_shares:
            return self.needed_shares[index]
        return 1 - self.ready_shares[index]

    def ready_seconds(self, nbytes: int) -> float:
        """Return the seconds of backward, waits included, until those gradients are made."""
        share = self.ready_share(nbytes)
        return share * self.backward_seconds + _waited(self.backward_waits, share)

    def needed_seconds(self, nbytes: int) -> float:
        """Return the seconds, waits included, until forward uses a parameter beyond ``nbytes``."""
        share = self.needed_share(nbytes)
        return share * self.before_seconds + _waited(self.forward_waits, share)


def _waited(waits: Sequence[Wait], share: float) -> float:
    """Return how long a pass has waited once it has computed that share, waits there included."""
    return sum(wait.seconds for wait in waits if wait.share <= share)


@dataclass(frozen=True)
class ComputeProfile:
    """Step times of ``ranks`` ranks on one machine at once, with ``threads`` threads each.

    Data and forward ("before") and backward each take ``fixed_seconds`` + ``sample_seconds`` x the
    rank's samples. The update takes ``update_seconds``, whatever the batch.
    """

    ranks: Ranks
    threads: Ranks
    before_fixed_seconds: PartSeconds
    before_sample_seconds: PartSeconds
    backward_fixed_seconds: PartSeconds
    backward_sample_seconds: PartSeconds
    update_seconds: PartSeconds

    def __post_init__(self) -> None:
        sample = self.before_sample_seconds + self.backward_sample_seconds
        if self.before_fixed_seconds + self.backward_fixed_seconds + sample < LEAST_SECONDS:
            raise ValueError(
                f"forward and backward take no time, expected at least {LEAST_SECONDS} s"
            )


Timed = TypeVar("Timed", StepCompute, ComputeProfile)


def times(timed: Timed, factor: float) -> Timed:
    """Return a step or a profile with every time multiplied by ``factor``."""
    changes: dict[str, Any] = {
        name: factor * value for name, value in vars(timed).items() if name.endswith("_seconds")
    }
    if isinstance(timed, StepCompute) and timed.alone is not None:
        changes["alone"] = times(timed.alone, factor)
    return replace(timed, **changes)


@dataclass(frozen=True)
class ComputeModel:
    """Profiles by rising number of ranks, and the order in which gradients become ready."""

    profiles: Annotated[tuple[ComputeProfile, ...], Meta(min_length=1, max_length=1000)]
    ready_bytes: Annotated[tuple[Count, ...], Meta(max_length=100_000)] = ()
    ready_shares: Annotated[tuple[Share, ...], Meta(max_length=100_000)] = ()

    def __post_init__(self) -> None:
        columns = {
            "the ranks of profiles": [profile.ranks for profile in self.profiles],
            "ready_bytes": self.ready_bytes,
            "ready_shares": self.ready_shares,
        }
        for name, values in columns.items():
            if any(value > following for value, following in pairwise(values)):
                raise ValueError(f"{name} must rise from each entry to the next")
        if len(self.ready_bytes) != len(self.ready_shares):
            raise ValueError(
                f"ready_bytes has {len(self.ready_bytes)} entries, ready_shares "
                f"{len(self.ready_shares)}: expected as many"
            )

    def at(self, samples: float, *, ranks_here: int = 1) -> StepCompute:
        """Return the step of a rank with ``samples`` samples, one of ``ranks_here`` on its machine.

        Between two profiles, the machine's time for a sample is interpolated over the logarithm of
        the ranks. Beyond the last profile it stays the same: ranks that share cores take turns.
        """
        ranks = [profile.ranks for profile in self.profiles]
        above = bisect.bisect_right(ranks, ranks_here)
        # The profiles on both sides of ``ranks_here``; beyond the first or last, that one twice.
        low = self.profiles[max(0, above - 1)]
        high = self.profiles[min(above, len(ranks) - 1)]
        share = 0.0  # 0 at low, 1 at high
        if low.ranks < ranks_here < high.ranks:
            share = math.log(ranks_here / low.ranks, high.ranks / low.ranks)
        crowding = max(1.0, ranks_here / ranks[-1])  # above 1 beyond the last profile

        def fixed(at_low: float, at_high: float) -> float:
            return crowding * (at_low + share * (at_high - at_low))

        def shared(at_low: float, at_high: float) -> float:
            # A rank's time grows with the ranks that share the cores; the machine's time, that of a
            # rank divided by the ranks, hardly does.
            machine_low = (1 - share) * at_low / low.ranks
            machine_high = share * at_high / high.ranks
            return ranks_here * (machine_low + machine_high)

        return StepCompute(
            fixed(low.before_fixed_seconds, high.before_fixed_seconds)
            + samples * shared(low.before_sample_seconds, high.before_sample_seconds),
            fixed(low.backward_fixed_seconds, high.backward_fixed_seconds)
            + samples * shared(low.backward_sample_seconds, high.backward_sample_seconds),
            shared(low.update_seconds, high.update_seconds),
            self.ready_bytes,
            self.ready_shares,
        )


def local_samples(batch_size: int, nodes: int, *, scaling: str, least: int = LEAST_SAMPLES) -> int:
    """Return the samples of the busiest rank, at least ``least``.

    scaling : "strong" divides a global batch of ``batch_size`` over the nodes, "weak" gives every
        node that many.
    """
    samples = batch_size
    if scaling == "strong":
        samples = math.ceil(batch_size / nodes)
    return max(least, samples)
