"""The plan of the strategy that sums inside each node before it sends anything between nodes."""

from dataclasses import dataclass

from common.sync.plans.base import ReplicatedPlan, option
from common.sync.plans.lines import SIZE, PlanLine, for_each
from common.utils.limits import Positive


@dataclass(kw_only=True)
class HierarchicalPlan(ReplicatedPlan):
    """For each flat buffer a reduce and a broadcast in each node, an all_reduce between them.

    The slowest path is that of a leader on the node with most ranks.

    Parameters
    ----------
    ranks_per_node : the last node may have fewer. None: the ranks find out who shares a node; the
        plan, which cannot, then counts one rank for each node.
    """

    ranks_per_node: Positive | None = option(
        None,
        "consecutive ranks that share a node; the last node may have fewer",
        defaults="those that torchrun starts on a node, else those on one machine",
    )

    messages = for_each(
        "buffer",
        PlanLine("reduce", SIZE, copied=SIZE, among="node", only_if="nodes of several ranks"),
        PlanLine("all_reduce", SIZE, among="leaders", only_if="several nodes of several ranks"),
        PlanLine(
            "all_reduce", SIZE, copied=SIZE, among="leaders", only_if="several nodes of one rank"
        ),
        PlanLine("broadcast", SIZE, among="node", only_if="nodes of several ranks"),
    )
