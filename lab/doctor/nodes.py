"""The nodes meet as the ranks of a run do, connect to each other, and compare what they are.

``check_nodes`` runs on every node. Each leaves a ``NodeReport`` in rank 0's store and waits for the
others with ``meet``, as a rank does (common/distributed/meeting.py). Gloo and NCCL connect all
nodes to each other, at ports that the system chooses; so every node answers at such a port
(``answer_probes``), connects to those of the others (``probe_nodes``), and leaves what it found.
``results_of`` turns all that into results, the same on every node. Imports torch.
"""

import contextlib
import socket
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated

import torch.distributed as dist
from msgspec import Meta

from common.distributed.gpus import Peer, choose_backend, this_peer, visible_gpus
from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import (
    MeetingError,
    are_set,
    keyed,
    meet,
    place_ranks,
    shared_store,
)
from common.distributed.node_identity import layout_of, node_numbers, nodes_text, ring_crossings
from common.errors import GroupError, UserError
from common.say import count, listed, ranks_text
from common.utils.grouping import grouped
from common.utils.network import is_loopback, listen, resolve, route_to, why_unreached
from common.utils.processes import in_thread
from common.utils.source_hash import code_digest
from common.utils.system import usable_cores
from common.utils.typed_json import Finite, Rank, Ranks, Text, decode, encode
from lab.doctor.check_result import CheckResult, failure, ok, warning
from lab.doctor.machine import check_dataset, commit, versions

_PROBE_SECONDS = 5.0  # to connect to a node
_GRACE_SECONDS = 5.0  # for nodes that are a little later than this one
_AT_ONCE = 16  # nodes to which a node connects at a time
_ROUND_TRIPS = 8  # to compare clocks: the shortest is the most exact
_FAR_SECONDS = 1.0  # clocks further apart: times in the logs of two nodes cannot be compared
_MOST_NAMED = 8
_SAME_SETUP = (
    "start lab doctor for every rank within --timeout, with the same --master-ip and --num-nodes "
    "everywhere and a different --rank for each"
)
# The facts that the nodes compare: the result if they differ, and what to do then.
_COMPARED: dict[str, tuple[Callable[[str, str], CheckResult], str]] = {
    "versions": (
        failure,
        "install the same versions on every node: make setup, from the same commit",
    ),
    "same python": (warning, "use the same Python on every node"),
    "same code": (failure, "check out the same commit on every node: git pull"),
    "same commit": (ok, ""),
    "same dataset": (
        failure,
        "copy the dataset from one node to all, and give the same --dataset",
    ),
}


@dataclass(frozen=True)
class NodeReport:
    """What a node reports about itself.

    address, port : where it answers probes. facts : by the names of the results.
    unreached : the ranks that it did not reach, each with the reason; None until it has tried.
    clock : by how many seconds its clock is ahead of rank 0's, and the uncertainty.
    """

    peer: Peer
    address: Text
    port: Annotated[int, Meta(ge=1, le=65_535)]
    cores: Ranks
    facts: dict[str, Text]
    unreached: list[tuple[Rank, Text]] | None = None
    clock: tuple[Finite, Finite] | None = None


Nodes = dict[int, NodeReport]  # by rank, those that came


def check_nodes(flags: Namespace) -> dict[str, CheckResult]:
    """Meet the other nodes; return the results by name, none without --num-nodes."""
    if not flags.num_nodes:
        return {}
    try:
        with listen(route_to(flags.master_ip), 0) as listener:
            address, port = listener.getsockname()[:2]
            facts = {
                "versions": versions(),
                "same python": "Python {}.{}".format(*sys.version_info),
                "same code": f"source hash {code_digest()}",
                "same commit": f"commit {commit()}",
                # The folder itself may differ.
                "same dataset": check_dataset(flags).text.replace(
                    str(flags.data_dir), "--data-dir"
                ),
            }
            own = NodeReport(this_peer(visible_gpus()), address, port, usable_cores(), facts)
            return results_of(flags, *exchange_reports(flags, own, listener))
    except (OSError, UserError, GroupError, dist.DistError) as error:
        return {"nodes": failure(str(error), _SAME_SETUP)}


def exchange_reports(
    flags: Namespace, own: NodeReport, listener: socket.socket
) -> tuple[Nodes, str]:
    """Return the reports of the nodes that came, and why not all did ("" if all did).

    The store's keys: "node R", the report of rank R, completed after the probes; "here", the ranks
    that came; "probed R" and "end R", how far rank R is.

    Raises GroupError or UserError if this node is none of them; DistError if rank 0 is lost.
    """
    rank = flags.rank
    launch = LaunchSpec(
        rank, flags.num_nodes, flags.master_ip, flags.master_port, generation="lab doctor"
    )
    server = shared_store(launch, flags.timeout, flag="--timeout")
    server.set_timeout(timedelta(seconds=flags.timeout + _GRACE_SECONDS))
    store = dist.PrefixStore(keyed(launch.token, "lab doctor"), server)
    # Sets the key only if it is new: the report of the first node that came with this rank.
    first = store.compare_set(f"node {rank}", "", encode(own).decode())
    problem = ""
    try:
        meet(launch, flags.timeout, store=server, flag="--timeout")
    except MeetingError as error:  # those that are here still test their connections
        problem = str(error)
    if rank == 0:
        came = [node for node in range(flags.num_nodes) if store.check([f"node {node}"])]
        store.set("here", encode(came).decode())
    here = decode(store.get("here"), list[Rank], name="rank 0's list of nodes")
    if rank not in here or first != encode(own):
        raise GroupError(problem)
    in_thread(partial(answer_probes, rank, listener))
    own = probe_nodes(rank, _read(store, here))
    store.set(f"node {rank}", encode(own).decode())
    store.set(f"probed {rank}", "")
    # A node that is not done by then has left, which its report shows.
    turns = 1 + len(here) // _AT_ONCE  # of a node that waits in vain for each of the others
    are_set(store, [f"probed {node}" for node in here], turns * _PROBE_SECONDS + _GRACE_SECONDS)
    nodes = _read(store, here)
    store.set(f"end {rank}", "")
    if rank == 0:  # the store ends with this process
        are_set(store, [f"end {node}" for node in here], _GRACE_SECONDS)
    return nodes, problem


def _read(store: dist.Store, ranks: list[int]) -> Nodes:
    """Return the reports that these ranks have left in the store so far."""
    return {
        rank: decode(store.get(f"node {rank}"), NodeReport, name=f"the report of rank {rank}")
        for rank in ranks
    }


def answer_probes(rank: int, listener: socket.socket) -> None:
    """Answer every connection with this rank and its clock, until the listener is closed."""
    while True:
        with listener.accept()[0] as connection, contextlib.suppress(OSError):
            connection.sendall(encode((rank, time.time())))


def probe_nodes(rank: int, nodes: Nodes) -> NodeReport:
    """Connect to every other node, several at once, and compare the clock with rank 0's.

    Returns this node's completed report.
    """
    others = [other for other in nodes if other != rank]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = pool.map(_why_unreached, others, map(nodes.get, others))
        unreached = [(other, why) for other, why in zip(others, reasons, strict=True) if why]
    clock = None
    if rank != 0 and 0 not in dict(unreached):
        clocks = [_probe(0, nodes[0]) for _ in range(_ROUND_TRIPS)]
        clock = min(clocks, key=lambda clock: clock[1])
    return replace(nodes[rank], unreached=unreached, clock=clock)


def _why_unreached(rank: int, node: NodeReport) -> str:
    """Return why this node does not reach another one; "" if it does."""
    try:
        _probe(rank, node)
    except (OSError, UserError) as error:
        return why_unreached(error)
    return ""


def _probe(rank: int, node: NodeReport) -> tuple[float, float]:
    """Return how far this clock is ahead of the node's, and the uncertainty, in seconds.

    The uncertainty is half of the round trip. Raises OSError if the node does not answer, UserError
    if another program does.
    """
    began = time.perf_counter()
    here = time.time()
    with socket.create_connection((node.address, node.port), _PROBE_SECONDS) as connection:
        answer = connection.recv(100)
    half = (time.perf_counter() - began) / 2
    other, there = decode(answer, tuple[Rank, Finite], name="the answer there")
    if other != rank:
        raise UserError(f"rank {other} answers there")
    return here + half - there, half


def results_of(flags: Namespace, nodes: Nodes, problem: str) -> dict[str, CheckResult]:
    """Return the results by name, from what ``exchange_reports`` returns."""
    came = f"{len(nodes)} of {flags.num_nodes} ranks connected"
    text = problem or f"{came} at {flags.master_ip}:{flags.master_port}"
    if left := [rank for rank, node in nodes.items() if node.unreached is None]:
        text += f"; {ranks_text(left)} left before reporting which ranks it reaches"
    found = {"nodes": failure(text, _SAME_SETUP) if problem or left else ok(text)}
    if len(nodes) > 1:
        found |= {"connections": _connections(nodes), "clocks": _clocks(nodes)}
        found |= {name: _compare(nodes, name) for name in _COMPARED}
        found["backend"] = _backend(nodes)
    if len(nodes) == flags.num_nodes > 1:
        found["shared nodes"] = _shared_nodes(flags, list(nodes.values()))
    return found | {"cores": _cores(nodes)}


def _connections(nodes: Nodes) -> CheckResult:
    """Judge every pair of nodes, in both directions."""
    directions = len(nodes) * (len(nodes) - 1)
    broken = [(rank, *lost) for rank, node in nodes.items() for lost in node.unreached or ()]
    if not broken:
        return ok(f"every rank reaches every other one ({directions} connections, at free ports)")
    [(worst, _)] = Counter(other for _, other, _ in broken).most_common(1)
    named = "; ".join(
        f"rank {rank} ({nodes[rank].address}) does not reach rank {other} "
        f"({nodes[other].address}): {why}"
        for rank, other, why in broken[:_MOST_NAMED]
    )
    return failure(
        f"{len(broken)} of {directions} connections fail: {named}",
        f"on rank {worst}'s node, open all ports to the other nodes in the firewall (Gloo and NCCL "
        "use any free port)",
    )


def _clocks(nodes: Nodes) -> CheckResult:
    """Warn of clocks that differ from rank 0's by more than a second beyond the uncertainty."""
    clocks = {rank: node.clock for rank, node in nodes.items() if node.clock}
    far = []
    for rank, (ahead, uncertainty) in clocks.items():
        if abs(ahead) - uncertainty > _FAR_SECONDS:
            far.append(f"rank {rank} by {ahead:+.2f} s (±{uncertainty:.3f} s)")
    if far:
        return warning(
            f"differ from rank 0's: {listed(far, most=_MOST_NAMED)}; times in different nodes' "
            "logs cannot be compared (measured durations are right)",
            "synchronise the clocks on every node: timedatectl set-ntp true",
        )
    if not clocks:
        return ok("not compared")
    ahead, uncertainty = max(clocks.values(), key=lambda clock: abs(clock[0]))
    return ok(f"within {abs(ahead) * 1e3:.2g} ms of rank 0's (±{uncertainty * 1e3:.2g} ms)")


def _compare(nodes: Nodes, name: str) -> CheckResult:
    """Return whether the fact is the same on all nodes; else which ranks have which value."""
    ranks_by_value = grouped((node.facts.get(name), rank) for rank, node in nodes.items())
    values = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
    if_different, remedy = _COMPARED[name]
    if len(values) > 1:
        return if_different(f"the ranks differ: {', '.join(values)}", remedy)
    return ok(f"{next(iter(ranks_by_value))} on every rank")


def _backend(nodes: Nodes) -> CheckResult:
    """Say which backend a run on these nodes chooses; warn if GPUs would stay unused."""
    gpus = place_ranks([node.peer for node in nodes.values()]).gpus
    try:
        backend, why = choose_backend(None, gpus, len(nodes))
    except UserError as error:
        return failure(str(error), "leave out nodes without a GPU, or train with --backend gloo")
    if gpus.count and backend == "gloo":
        return warning(why, "start one rank per GPU, and leave out nodes without a GPU")
    return ok(why or "Gloo, on CPUs")


def _shared_nodes(flags: Namespace, reports: Sequence[NodeReport]) -> CheckResult:
    """Say which ranks share a node; warn of an order or of numbers that nobody wants."""
    layout = layout_of([report.peer.node for report in reports])
    hosts = [report.peer.host for report in reports]
    if len(layout) == len(reports):
        return ok("each rank has a node of its own")
    text = nodes_text(layout, hosts)
    crossings = ring_crossings(layout)
    if crossings > len(layout):
        in_order = layout_of(sorted(node_numbers(layout)))
        hosts_in_order = [hosts[rank] for ranks in layout for rank in ranks]
        return warning(
            f"{text}; a ring in rank order goes from node to node {crossings} times instead of "
            f"{len(layout)}",
            f"give each node neighbouring ranks, as here: {nodes_text(in_order, hosts_in_order)}",
        )
    sizes = [len(ranks) for ranks in layout]
    if len(set(sizes)) > 1:
        return warning(
            f"{text}; they have different numbers of ranks ({', '.join(map(str, sizes))}), and the "
            "others wait for the fullest",
            "if a machine was started twice by mistake, start that rank on another one",
        )
    if len(layout) == 1 and not all(map(is_loopback, resolve(flags.master_ip))):
        return warning(
            f"{text}; all ranks share one node, although other machines reach --master-ip "
            f"{flags.master_ip}",
            "to use several machines, start each of the other ranks on its own",
        )
    return ok(text)


def _cores(nodes: Nodes) -> CheckResult:
    """Compare the number of ranks that share a machine with its cores."""
    by_machine = grouped((node.peer.machine, node) for node in nodes.values())
    crowded = []
    for there in by_machine.values():
        host = there[0].peer.host
        ranks = len(there)
        cores = min(node.cores for node in there)  # a container may give one of the ranks fewer
        if ranks > cores:
            crowded.append(f"{host} has {ranks} ranks and {count(cores, 'core')}")
    if crowded:
        return warning(
            f"{'; '.join(crowded)}: ranks wait for cores, so step times show the machine, not the "
            "strategy",
            "start at most one rank per core, or measure with --compute measured",
        )
    return ok("no more ranks than cores on any machine")
