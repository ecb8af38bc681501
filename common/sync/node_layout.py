"""Which ranks share a node: ``NodeLayout``. A node is a machine, a rank is a process. No torch."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from common.sync.message_cost import Among


@dataclass(frozen=True)
class NodeLayout:
    """How many ranks each node has; ranks count through the nodes, node 0's first.

    Parameters
    ----------
    sizes : number of ranks of each node, at least 1: (2, 2, 1) are the ranks 0 and 1, 2 and 3, 4.
    """

    sizes: tuple[int, ...]

    @classmethod
    @lru_cache
    def even(cls, ranks: int, ranks_per_node: int = 1) -> "NodeLayout":
        """Return the layout of ``ranks`` with so many on each node; the last may have fewer."""
        full, others = divmod(ranks, ranks_per_node)
        last = (others,) if others else ()
        return cls((ranks_per_node,) * full + last)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.leaders[-1] + self.sizes[-1]

    def node_of(self, rank: int) -> int:
        """Return the node of a rank, counted from 0."""
        return bisect_right(self.leaders, rank) - 1

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        leader = self.leaders[node]
        return range(leader, leader + self.sizes[node])

    def among(self, which: Among, rank: int) -> Sequence[int]:
        """Return the ranks among which an operation of ``rank`` is, in order."""
        if which == "all":
            return range(self.ranks)
        if which == "leaders":
            return self.leaders
        return self.ranks_of(self.node_of(rank))
