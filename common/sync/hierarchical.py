r"""Sums inside each node first: between nodes travels one sum for each node, not for each rank.

    node 0:  1 -> 0 <-+         1. reduce: each node's first rank, its leader, gets the node's sum
                      |         2. all_reduce: the leaders add up these sums, in a ring
    node 1:  3 -> 2 <-+         3. broadcast: each leader passes the whole sum on inside its node

Sends: inside a node, every rank but the leader M bytes, the leader up to (log2 K + (K-1)/K) M.
    Between nodes each leader 2(n-1)/n M bytes, and receives as much; no other rank sends any.
    A ring over all ranks (all_reduce_flat.py) puts 2(N-1)/N M on each node's link: hardly more.
Time: 2(n-1) alpha + 2(n-1)/n M / B between the nodes, and inside them (K + log2 K) alpha' +
    (2(K-1)/K + log2 K) M / B', one after the other; (n-1)/n M gamma + (K-1)/K M gamma; and one copy
    of M bytes in memory. Nothing is copied back (flat_buffer.py).
Common mistake: taking the mean twice, first inside the node and then of all N ranks. Another: the
    mean of the nodes' means, which is wrong if nodes have different numbers of ranks. Here sums
    travel: each gradient is divided by N once.

(N ranks on n nodes of K; M bytes of gradients; alpha seconds per message, B bytes per second on a
node's link, alpha' and B' inside it, gamma seconds to add one byte.) Each dtype has its own buffer.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.distributed.collectives import gather_objects
from common.distributed.node_identity import layout_of, node_identity
from common.distributed.process_group import current_world
from common.sync.base import FlatSync


class Hierarchical(FlatSync):
    """One reduce and one broadcast inside each node, one all_reduce between the nodes."""

    _groups: Sequence[dist.ProcessGroup] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class. The first call also makes the groups; each rank has to make all."""
        training = super().prepare(model, optimizer)
        if not self._groups:
            nodes = self._nodes()
            self._node = next(ranks for ranks in nodes if dist.get_rank() in ranks)
            self._leaders = [ranks[0] for ranks in nodes]
            timeout = _timeout()
            made = {ranks[0]: dist.new_group(ranks, timeout=timeout) for ranks in nodes}
            self._inside = made[self._node[0]]
            self._between = dist.new_group(self._leaders, timeout=timeout)
            self._groups = [*made.values(), self._between]
        return training

    def _nodes(self) -> list[list[int]]:
        """Return the ranks of each node."""
        ranks = dist.get_world_size()
        if self.plan.ranks_per_node is None:
            return layout_of(gather_objects(current_world(), node_identity(), schema=str))
        layout = self.plan.layout(ranks)
        return [list(layout.ranks_of(node)) for node in range(len(layout.sizes))]

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        leader = self._node[0]
        if len(self._node) > 1:
            dist.reduce(total, dst=leader, group=self._inside)
        if dist.get_rank() == leader and len(self._leaders) > 1:
            dist.all_reduce(total, group=self._between)
        if len(self._node) > 1:
            dist.broadcast(total, src=leader, group=self._inside)

    def close(self) -> None:
        """See the base class."""
        super().close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = ()


def _timeout():
    group = dist.group.WORLD
    device = current_world().device
    return group._get_backend(device).options._timeout
