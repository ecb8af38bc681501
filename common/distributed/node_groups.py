"""Groups of the ranks that share a node: ``ranks_by_node`` finds them, ``open_group_of`` opens one.

Both are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from common.distributed.collectives import gather_objects
from common.distributed.launch_env import launch_from_environment
from common.distributed.node_identity import layout_of
from common.distributed.process_group import current_world
from common.errors import UserError
from common.utils.grouping import grouped

if TYPE_CHECKING:
    from common.distributed.gpus import Peer


def ranks_by_node(ranks_per_node: int | None) -> list[list[int]]:
    """Return the ranks of each node; the nodes count in the order of their first ranks.

    ranks_per_node : this many consecutive ranks share a node. None: the ranks that a launcher such
        as torchrun started together share one; without a launcher, the ranks on one machine, which
        need not be neighbours.

    Raises UserError on every rank if ``ranks_per_node`` is more than all ranks, or if torchrun
    started other numbers.
    """
    world = current_world()
    if world.size == 1:
        return [[0]]
    # One process needs none of it.
    from common.distributed.gpus import Peer, this_peer

    launch = launch_from_environment(world.rank, world.size)
    mine = this_peer((), launch.local_rank, local_size=launch.local_size)
    peers = gather_objects(world, mine, schema=Peer)
    launched = _as_launched(peers)
    if ranks_per_node is None:
        return launched or layout_of([peer.node for peer in peers])
    if ranks_per_node > world.size:
        raise UserError(
            f"ranks per node: got {ranks_per_node}, but there are {world.size} ranks in all: give "
            f"1 to {world.size}, or leave it out"
        )
    starts = range(0, world.size, ranks_per_node)
    asked = [list(range(first, min(first + ranks_per_node, world.size))) for first in starts]
    by_torchrun = launch.agent is not None  # nobody chose its numbers for a rehearsal
    if by_torchrun and launched not in (None, asked):
        raise UserError(
            f"ranks per node: got {ranks_per_node}, but torchrun set "
            f"LOCAL_WORLD_SIZE={peers[0].local_size}: leave --ranks-per-node out under torchrun"
        )
    return asked


def _as_launched(peers: Sequence[Peer]) -> list[list[int]] | None:
    """Return the ranks that a launcher started on each node.

    None if some rank has no launcher, or if its numbers do not count through the nodes.
    """
    starts = []
    for rank, peer in enumerate(peers):
        if peer.local_rank is None:
            return None
        starts.append((rank - peer.local_rank, rank))
    nodes = list(grouped(starts).values())
    for ranks in nodes:
        if any(peers[rank].local_size != len(ranks) for rank in ranks):
            return None
    return nodes


def open_group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Open a group of these ranks, with the timeout of the group of all ranks.

    None on a rank that is not in it, and for a single rank, which has nobody to send to.
    """
    if len(ranks) == 1:
        return None
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(current_world().device)
    group = dist.new_group(list(ranks), timeout=backend.options._timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def close_group(group: dist.ProcessGroup | None) -> None:
    """Close a group of ``open_group_of``, if it is still open.

    Under NCCL it stays open until the group of all ranks closes: it would wait for a lost rank.
    """
    if group is not None and dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        dist.destroy_process_group(group)
