"""Which ranks share a node: real namespaces, launchers that contradict them, real runs.

``tests/lab/cluster/test_nodes.py`` trains on nodes with two ranks each.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from common.distributed.gpus import Peer
from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import meet, place_ranks
from common.distributed.node_identity import (
    layout_of,
    machine_identity,
    node_identity,
    node_numbers,
    nodes_text,
    ring_crossings,
)
from common.utils.processes import in_thread
from tests.helpers import ROOT
from tests.helpers.cluster import needs_namespaces

# Each line is an identity: of this shell's child, in a network of its own, under another host
# name, and after another start of the kernel, as on another machine of this host name.
IDENTITIES = """
tell() { "$PYTHON" -c "$WHO"; }
tell
unshare --net "$PYTHON" -c "$WHO"
hostname elsewhere; tell; hostname "$(cat "$FOLDER/name")"
cat /proc/sys/kernel/random/uuid > "$FOLDER/boot"
mount --bind "$FOLDER/boot" /proc/sys/kernel/random/boot_id
tell
"""
WHO = """
import json
from common.distributed.node_identity import machine_identity, node_identity
print(json.dumps([machine_identity(), node_identity()]))
"""


@needs_namespaces
def test_a_node_is_a_host_name_a_start_of_the_kernel_and_a_network(tmp_path):
    (tmp_path / "name").write_text(os.uname().nodename)
    namespaces = ("--user", "--map-root-user", "--mount", "--uts")
    done = subprocess.run(
        ["unshare", *namespaces, "sh", "-e", "-c", IDENTITIES],
        env=os.environ
        | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "WHO": WHO, "FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    here, network, name, boot = map(json.loads, done.stdout.splitlines())
    assert here == [machine_identity(), node_identity()], "the same node, in another process"
    assert network[0] == here[0], "emulated nodes share the machine, with its cores and GPUs"
    assert len({node for _, node in (here, network, name, boot)}) == 4
    assert len({machine for machine, _ in (here, name, boot)}) == 3


@pytest.mark.parametrize(
    ("identities", "layout", "crossings", "text"),
    [
        ("aabb", [[0, 1], [2, 3]], 2, "2 nodes: ranks 0-1 on a; ranks 2-3 on b"),
        ("abab", [[0, 2], [1, 3]], 4, "2 nodes: ranks 0 and 2 on a; ranks 1 and 3 on b"),
        ("abca", [[0, 3], [1], [2]], 3, "3 nodes: ranks 0 and 3 on a; rank 1 on b; rank 2 on c"),
        ("bbab", [[0, 1, 3], [2]], 2, "2 nodes: ranks 0-1 and 3 on b; rank 2 on a"),
        ("aaa", [[0, 1, 2]], 0, "1 node: ranks 0-2 on a"),
        ("a", [[0]], 0, "1 node: rank 0 on a"),
    ],
)
def test_the_ranks_of_each_node(identities, layout, crossings, text):
    assert layout_of(identities) == layout
    assert [layout[node].count(rank) for rank, node in enumerate(node_numbers(layout))] == [
        1 for _ in identities
    ]
    assert ring_crossings(layout) == crossings
    assert nodes_text(layout, identities) == text


def test_nodes_of_one_host_name_are_told_apart_and_many_nodes_are_cut():
    text = nodes_text([[0, 1], [2]], ["vm"] * 3)
    assert text == "2 nodes: ranks 0-1 on node 0 (vm); rank 2 on node 1 (vm)"
    many = nodes_text(layout_of([rank // 2 for rank in range(40)]), list(map(str, range(40))))
    assert many.startswith("20 nodes: ranks 0-1 on 0; ranks 2-3 on 2;")
    assert many.endswith("ranks 14-15 on 14; 12 more")


def peers(*places, sizes=None):
    """Return peers of one host name; places : of each rank, its machine and its network."""
    return [
        Peer("vm", rank, [], machine, machine + network, local_size=size)
        for rank, ((machine, network), size) in enumerate(
            zip(places, sizes or [None] * len(places), strict=True)
        )
    ]


def test_cores_belong_to_machines_and_links_to_nodes():
    """Not to host names: these ranks have one, on two machines, one of which has two networks."""
    outcome = place_ranks(peers("A1", "A1", "A2", "B1"))
    assert outcome.places == [(0, 3), (1, 3), (2, 3), (0, 1)]
    assert outcome.nodes == [0, 0, 1, 2]
    assert outcome.notice == ""


def test_a_launcher_that_contradicts_the_nodes_is_named_with_both_numbers():
    right = peers("A1", "A1", "A2", "A2", sizes=[2, 2, 2, 2])
    assert place_ranks(right).notice == ""
    agents = peers("A1", "A1", "A1", "A1", sizes=[2, 2, 2, 2])  # two on one machine
    for words in ("LOCAL_WORLD_SIZE of rank 0 is 2,", "vm has 4 ranks: ranks 0, 1, 2 and 3"):
        assert words in place_ranks(agents).notice
    apart = peers("A1", "A1", "B1", "C1", sizes=[2, 2, 2, 2])
    for words in ("LOCAL_WORLD_SIZE of rank 2 is 2,", "vm has 1 rank: rank 2"):
        assert words in place_ranks(apart).notice
    assert place_ranks([replace(peer, local_size=None) for peer in apart]).notice == ""


@pytest.mark.parametrize(("said", "noticed"), [(2, False), (1, True)])
def test_ranks_that_meet_learn_their_node_and_what_the_launcher_said_wrongly(said, noticed):
    store = dist.HashStore()
    ranks = [LaunchSpec(rank, 2, "127.0.0.1", local_rank=0, local_size=said) for rank in range(2)]
    other = in_thread(lambda: meet(ranks[1], 20.0, store=store))
    _, outcome = meet(ranks[0], 20.0, store=store)
    assert other.result()[1] == outcome
    assert outcome.nodes == [0, 0]
    assert bool(outcome.notice) == noticed
