"""Which ranks share a node: ``NodeLayout``. A node is a machine, a rank is a process. No torch."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class NodeLayout:
    """How many ranks each node has; ranks count through the nodes, node 0's first.

    Parameters
    ----------
    sizes : number of ranks of each node, at least 1: (2, 2, 1) are the ranks 0 and 1, 2 and 3, 4.
    """

    sizes: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=8)  # a prediction asks for one layout again and again
    def even(cls, ranks: int, ranks_per_node: int = 1) -> "NodeLayout":
        """Return the layout of ``ranks`` on full nodes; the last node may have fewer."""
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
