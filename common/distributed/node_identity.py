"""Which ranks share a node: by what the system says about itself, not by what somebody set.

A rank tells the others its ``node_identity``; ``layout_of`` groups those of all ranks. No torch
here.
"""

import os
import re
import socket
from collections.abc import Sequence
from itertools import pairwise

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

    That is the host's name and, on Linux, a number that each start of the kernel draws: different
    machines may have one name, as containers often do, and containers of one machine may have two.
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


def layout_of(identities: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, by the ``node_identity`` of every rank, in rank order.

    Nodes count in the order of their first ranks. The ranks of a node need not be neighbours.
    """
    return list(grouped((node, rank) for rank, node in enumerate(identities)).values())


def are_neighbours(layout: Sequence[Sequence[int]]) -> bool:
    """Return whether each node's ranks follow each other: then a ring enters each node once."""
    return all(after == rank + 1 for ranks in layout for rank, after in pairwise(ranks))
