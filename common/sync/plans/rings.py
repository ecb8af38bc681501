"""Plans of the strategies without a root: all_reduce after backward, rings and trees by hand."""

from collections.abc import Sequence

from common.sync.message_cost import COPIES_PER_PARAMETER, Sends
from common.sync.plans.base import ReplicatedPlan
from common.sync.plans.lines import SIZE, PlanLine, for_each, sends_of_patterns
from common.sync.plans.pieces import SentStep


class AllReducePlan(ReplicatedPlan):
    """An all_reduce for each parameter."""

    messages = for_each(
        "gradient", PlanLine("all_reduce", SIZE, copied=COPIES_PER_PARAMETER * SIZE)
    )


class AllReduceFlatPlan(ReplicatedPlan):
    """An all_reduce for each flat buffer."""

    messages = for_each("buffer", PlanLine("all_reduce", SIZE, copied=SIZE))


class RoundsPlan(ReplicatedPlan):
    """Base class of the plans with rounds of point-to-point messages (patterns.py)."""

    def sends(self, sizes: Sequence[int], rank: int, ranks: int) -> list[Sends]:
        """See the base class."""
        return sends_of_patterns(self.messages, rank, SentStep(sizes, ranks, vars(self)))


class TreePlan(RoundsPlan):
    """For each flat buffer one round up and one round down for each level of the tree."""

    messages = for_each("buffer", pattern="tree")


class RingPlan(RoundsPlan):
    """For each flat buffer N-1 rounds that add chunks, and N-1 that pass the sums on."""

    messages = for_each("buffer", pattern="ring")


class HalvingDoublingPlan(RoundsPlan):
    """For each flat buffer rounds that add halves, quarters and so on, then the same in reverse."""

    messages = for_each("buffer", pattern="halving_doubling")
