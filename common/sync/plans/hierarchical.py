"""The plan of the strategy that sums inside each node before it sends anything between nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.sync.message_cost import Operation, buffers
from common.sync.node_layout import NodeLayout
from common.sync.plans.base import ReplicatedPlan, option
from common.utils.limits import Positive


@dataclass(kw_only=True)
class HierarchicalPlan(ReplicatedPlan):
    """For each flat buffer a reduce and a broadcast in each node, an all_reduce between them.

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

    def layout(self, ranks: int) -> NodeLayout:
        """See the base class."""
        return NodeLayout.even(ranks, self.ranks_per_node or 1)

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. The slowest path is that of a leader on the node with most ranks."""
        on_a_node = min(self.ranks_per_node or 1, ranks)
        shared = on_a_node > 1
        several = on_a_node < ranks
        found = []
        for size in buffers(sizes):
            if shared:
                found.append(Operation("reduce", size, copied_bytes=size, among="node"))
            if several:
                copied = 0 if shared else size
                found.append(Operation("all_reduce", size, copied_bytes=copied, among="leaders"))
            if shared:
                found.append(Operation("broadcast", size, among="node"))
        return found
