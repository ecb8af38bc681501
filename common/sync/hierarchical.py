"""Sum inside each node first, so that one sum per node travels between nodes, not one per rank.

    node 0:  1 --> 0 <--+       1. reduce: each node's first rank, its leader, gets the node's sum
                        |       2. all_reduce: the leaders add up these sums, in a ring
    node 1:  3 --> 2 <--+       3. broadcast: each leader passes the whole sum on inside its node

Sends: between nodes each leader 2(n-1) messages, 2(n-1)/n M bytes, and receives as much; no other
    rank sends any there. Inside its node it sends (log2 K + (K-1)/K) M, each other rank M, and up
    to (log2 K - 1) M more. A ring over all ranks in order (all_reduce_flat.py) puts 2(N-1)/N M on
    each node's link, in 2(N-1) messages one after the other.
Time: 2(n-1) alpha + 2(n-1)/n M / B + (n-1)/n M gamma between the nodes; before and after it inside
    them (K + log2 K) alpha' + (2(K-1)/K + log2 K) M / B' + (K-1)/K M gamma. And one copy of M bytes
    in memory; nothing is copied back (flat_buffer.py).
Common mistake: a mean in the node, then one over all N ranks: the gradient is divided twice.
    Another: a mean in the node, then one of the nodes' means, where nodes have different numbers of
    ranks. Here sums travel, and each gradient is divided by N once.

(N ranks on n nodes of K; M bytes of gradients; alpha seconds per message and B bytes per second on
a node's link, alpha' and B' inside it, gamma seconds to add one byte.) Each dtype has its own
buffer.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.distributed.node_groups import close_group, open_group_of, ranks_by_node
from common.sync.base import FlatSync
from common.sync.plans.hierarchical import HierarchicalPlan


class Hierarchical(FlatSync):
    """One reduce and one broadcast inside each node, one all_reduce between the nodes."""

    plan: HierarchicalPlan
    _nodes: Sequence[Sequence[int]] = ()  # the ranks of each
    _leader = 0  # of this rank's node
    _inside: dist.ProcessGroup | None = None  # this rank's node; None if it is alone there
    _between: dist.ProcessGroup | None = None  # the leaders, on a leader; None on a single node

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class. The first call finds out who shares a node, and opens the groups."""
        if not self._nodes:
            self._nodes = ranks_by_node(self.plan.ranks_per_node)
            self._open_groups()
        return super().prepare(model, optimizer)

    def _open_groups(self) -> None:
        """Open every group on every rank in the same order, as torch wants it."""
        for ranks in self._nodes:
            group = open_group_of(ranks)
            if dist.get_rank() in ranks:
                self._leader = ranks[0]
                self._inside = group
        self._between = open_group_of([ranks[0] for ranks in self._nodes])

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        if self._inside is not None:
            dist.reduce(total, dst=self._leader, group=self._inside)
        if self._between is not None:
            dist.all_reduce(total, group=self._between)
        if self._inside is not None:
            dist.broadcast(total, src=self._leader, group=self._inside)

    def close(self) -> None:
        """See the base class."""
        super().close()
        close_group(self._inside)
        close_group(self._between)
        self._nodes = ()
        self._inside = None
        self._between = None
