"""Plans of the strategies whose gradients all pass rank 0, the root."""

from common.sync.message_cost import COPIES_PER_PARAMETER
from common.sync.plans.base import ReplicatedPlan
from common.sync.plans.lines import OTHER_RANKS, SIZE, PlanLine, for_each


class GatherScatterPlan(ReplicatedPlan):
    """For each parameter a gather, which the root adds up, and a scatter."""

    messages = for_each(
        "gradient",
        PlanLine("gather", SIZE, summed=OTHER_RANKS * SIZE, copied=COPIES_PER_PARAMETER * SIZE),
        PlanLine("scatter", SIZE),
    )


class GatherScatterFlatPlan(ReplicatedPlan):
    """For each flat buffer a gather, which the root adds up, and a scatter."""

    messages = for_each(
        "buffer",
        PlanLine("gather", SIZE, summed=OTHER_RANKS * SIZE, copied=SIZE),
        PlanLine("scatter", SIZE),
    )


class ReduceBroadcastPlan(ReplicatedPlan):
    """For each parameter a reduce and a broadcast."""

    messages = for_each("gradient", PlanLine("reduce", SIZE), PlanLine("broadcast", SIZE))
