"""Which ranks share a node: by what the system says about itself, not by what somebody set.

A rank tells the others its ``node_identity``; ``layout_of`` groups those of all ranks. No torch
here.
"""

import os
import re
import socket
from collections.abc import Hashable, Sequence
from operator import ne

from common.say import count, listed, spans
from common.utils.grouping import grouped
from common.utils.system import lines_of


def host_name() -> str:
    """Return this host's name, without characters that no host name has."""
    return plain_name(socket.gethostname())


def plain_name(name: str) -> str:
    """Return the name with "_" for each character that no host name has."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def machine_identity() -> str:
    """Return a text that is equal for processes on one machine, which share its cores and GPUs.

    That is the host's name and, on Linux, a number that each start of the kernel draws, since
    different machines may have one name. A container with a name of its own counts as a machine.
    """
    return " ".join([host_name(), *lines_of("/proc/sys/kernel/random/boot_id")[:1]])


def node_identity() -> str:
    """Return a text that is equal for processes on one node, which share a link to the others.

    That is the machine and, on Linux, the network namespace: emulated nodes, and containers with
    networks of their own, are several nodes on one machine.
    """
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return machine_identity()
    return f"{machine_identity()} {namespace}"


def layout_of(identities: Sequence[Hashable]) -> list[list[int]]:
    """Return the ranks of each node, by the ``node_identity`` of every rank, in rank order.

    Nodes count in the order of their first ranks. The ranks of a node need not be neighbours.
    """
    return list(grouped((node, rank) for rank, node in enumerate(identities)).values())


def node_numbers(layout: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of each rank's node, for a layout of ``layout_of``."""
    numbers = [0] * sum(map(len, layout))
    for node, ranks in enumerate(layout):
        for rank in ranks:
            numbers[rank] = node
    return numbers


def ring_crossings(layout: Sequence[Sequence[int]]) -> int:
    """Return how often a ring over the ranks in their order goes from one node to another."""
    numbers = node_numbers(layout)
    of_next_rank = [*numbers[1:], numbers[0]]
    return sum(map(ne, numbers, of_next_rank))


_MOST_NAMED = 8


def nodes_text(layout: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """Return "2 nodes: ranks 0-1 on hostA; ranks 2-3 on hostB"; hosts : of every rank.

    Emulated nodes, which have one host name, also get their numbers.
    """
    names = [hosts[ranks[0]] for ranks in layout]
    ambiguous = len(set(names)) < len(names)
    places = []
    for node, ranks in enumerate(layout):
        name = f"node {node} ({names[node]})" if ambiguous else names[node]
        noun = "rank" if len(ranks) == 1 else "ranks"
        places.append(f"{noun} {listed(spans(ranks), most=_MOST_NAMED)} on {name}")
    if len(places) > _MOST_NAMED:
        places[_MOST_NAMED:] = [f"{len(places) - _MOST_NAMED} more"]
    return f"{count(len(layout), 'node')}: {'; '.join(places)}"
