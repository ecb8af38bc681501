"""The nodes exchange what they find: rank 0 listens at the master's port, the others connect, then each connects to each.

Call ``connect_nodes`` on every node. In order: a node sends rank 0 its report, measures its clock against rank 0's, receives the
addresses of all nodes, connects to each (connectivity.py), sends rank 0 the result, and receives the results of all. So every
node ends with the same NodeExchange.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lab.doctor.check_result import reason
from lab.doctor.connectivity import ProbeServer, probe_ranks
from lab.doctor.json_messages import accept, listen, receive, send
from lab.doctor.network import route_to

_HELLO_SECONDS = 3.0
_MOST_SECONDS_A_PAIR = 5.0
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_ROUND_TRIPS = 8


@dataclass(frozen=True)
class NodeAddress:
    """The master's address and this node's rank, as the parts' flags give them."""

    master_ip: str
    master_port: int
    num_nodes: int
    rank: int


@dataclass(frozen=True)
class NodeReport:
    """What one node reports of itself. The field names are keys of the messages between nodes.

    address, port : where its ProbeServer listens. facts : plain values by name. clock_seconds : how far its clock is ahead of
    rank 0's, within ``uncertainty_seconds``, half of the fastest round trip; None for rank 0. unreached : by rank, why this
    node did not reach that one.
    """

    rank: int
    host: str
    address: str
    port: int
    facts: Mapping[str, Any]
    clock_seconds: float | None = None
    uncertainty_seconds: float | None = None
    unreached: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeExchange:
    """Which nodes connected, by rank, and what went wrong; ``problems`` in words. ``nodes`` is empty where this node reached no
    other one."""

    own: NodeAddress
    nodes: Mapping[int, NodeReport]
    problems: tuple[str, ...] = ()

    @property
    def missing(self) -> list[int]:
        """The ranks that did not connect."""
        return [rank for rank in range(self.own.num_nodes) if rank not in self.nodes]


def connect_nodes(
    own: NodeAddress,
    facts: Mapping[str, Any],
    *,
    timeout_seconds: float,
    host: str | None = None,
    clock: Callable[[], float] = time.time,
    open_listener: Callable[[], socket.socket] = listen,
) -> NodeExchange:
    """Connect to the other nodes' doctors and return what all of them found.

    Waits up to ``timeout_seconds`` for the others; the whole takes at most twice that and some 20 s. ``open_listener`` opens the
    socket that the others connect to. Raises OSError on rank 0 where the master's port is taken, elsewhere only without a route.
    """
    with ProbeServer(own.rank, open_listener()) as probe_server:
        report = NodeReport(
            own.rank,
            host or socket.gethostname(),
            route_to(own.master_ip),
            probe_server.port,
            dict(facts),
        )
        if own.rank == 0:
            return _collect_nodes(own, report, timeout_seconds, clock=clock)
        return _join_master(own, report, timeout_seconds, clock=clock)


def _collect_nodes(
    own: NodeAddress, report: NodeReport, timeout_seconds: float, *, clock: Callable[[], float]
) -> NodeExchange:
    deadline = time.monotonic() + timeout_seconds
    nodes = {0: report}
    connections: dict[int, socket.socket] = {}
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(own.master_port))
        while len(nodes) < own.num_nodes and time.monotonic() < deadline:
            connection = accept(listener, deadline=deadline)
            if connection is None:
                break
            stack.enter_context(connection)
            # Another program, or a node that has gone: it counts as missing.
            with contextlib.suppress(OSError, KeyError, TypeError):
                node, problem = _admit(connection, own, nodes, deadline, clock=clock)
                if problem:
                    problems.append(problem)
                if node is not None:
                    nodes[node.rank], connections[node.rank] = node, connection
        limit = min(_MOST_SECONDS_A_PAIR, timeout_seconds)
        addresses = {rank: (node.address, node.port) for rank, node in nodes.items()}
        _send_to_all(connections, {"doors": addresses, "seconds": limit})
        nodes[0] = replace(report, unreached=probe_ranks(0, addresses, limit))
        deadline = time.monotonic() + limit + _GRACE_SECONDS
        for rank, connection in connections.items():
            try:
                unreached = _ranks(receive(connection, deadline=deadline)["unreached"])
                nodes[rank] = replace(nodes[rank], unreached=unreached)
            except (OSError, KeyError):
                problems.append(f"rank {rank} came and left before it had told what it reached")
        reports = [asdict(node) for node in nodes.values()]
        _send_to_all(connections, {"nodes": reports, "problems": problems})
    return NodeExchange(own, nodes, tuple(problems))


def _send_to_all(connections: Mapping[int, socket.socket], message: Mapping[str, Any]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            send(connection, message, deadline=time.monotonic() + _HELLO_SECONDS)


def _admit(
    connection: socket.socket,
    own: NodeAddress,
    nodes: Mapping[int, NodeReport],
    deadline: float,
    *,
    clock: Callable[[], float],
) -> tuple[NodeReport | None, str]:
    """Read a node's report and answer its requests for the time; return the node, or None and why it is refused."""
    soon = min(deadline, time.monotonic() + _HELLO_SECONDS)
    hello = receive(connection, deadline=soon)
    node, num_nodes, problem = _node_report(hello.get("node")), hello.get("num_nodes"), ""
    if num_nodes != own.num_nodes:
        problem = f"rank {node.rank} was started with --num-nodes {num_nodes}, rank 0 with {own.num_nodes}"
    elif not 0 <= node.rank < num_nodes:
        problem = f"a node came as rank {node.rank} of {num_nodes}"
    elif node.rank in nodes:
        problem = (
            f"rank {node.rank} was started twice: on {nodes[node.rank].host} and on {node.host}"
        )
    send(connection, {"refused": problem, "wait": deadline - time.monotonic()}, deadline=soon)
    if problem:
        return None, problem
    for _ in range(_ROUND_TRIPS):
        receive(connection, deadline=soon)
        send(connection, {"time": clock()}, deadline=soon)
    clocks = receive(connection, deadline=soon)
    node = replace(
        node,
        clock_seconds=clocks["clock_seconds"],
        uncertainty_seconds=clocks["uncertainty_seconds"],
    )
    return node, ""


def _join_master(
    own: NodeAddress, report: NodeReport, timeout_seconds: float, *, clock: Callable[[], float]
) -> NodeExchange:
    deadline, where = time.monotonic() + timeout_seconds, f"{own.master_ip}:{own.master_port}"
    master, why = _reach(own, deadline)
    if master is None:
        problem = (
            f"rank {own.rank} did not reach rank 0 at {where} within {timeout_seconds:g} s ({why})"
        )
        return NodeExchange(own, {}, (problem,))
    with master:
        try:
            send(master, {"num_nodes": own.num_nodes, "node": asdict(report)}, deadline=deadline)
            answer = receive(master, deadline=deadline + _GRACE_SECONDS)
            if answer["refused"]:
                return NodeExchange(own, {}, (answer["refused"],))
            ahead, uncertainty = _measure_clock(
                master, clock, deadline=time.monotonic() + _GRACE_SECONDS
            )
            send(
                master,
                {"clock_seconds": ahead, "uncertainty_seconds": uncertainty},
                deadline=time.monotonic() + _GRACE_SECONDS,
            )
            wait = min(answer["wait"], timeout_seconds) + _GRACE_SECONDS
            others = receive(master, deadline=time.monotonic() + wait)
            addresses = {int(rank): (host, port) for rank, (host, port) in others["doors"].items()}
            unreached = probe_ranks(own.rank, addresses, others["seconds"])
            soon = time.monotonic() + others["seconds"] + 2 * _GRACE_SECONDS
            send(master, {"unreached": unreached}, deadline=soon)
            end = receive(master, deadline=soon)
            nodes = [_node_report(entry) for entry in end["nodes"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = f"what answers at {where} is no lab doctor of this version"
            return NodeExchange(own, {}, (problem,))
        except OSError as error:
            problem = f"rank {own.rank} reached {where}, but no lab doctor answered to the end ({reason(error)})"
            return NodeExchange(own, {}, (problem,))
    return NodeExchange(own, {node.rank: node for node in nodes}, tuple(end["problems"]))


def _reach(own: NodeAddress, deadline: float) -> tuple[socket.socket | None, str]:
    """Connect to rank 0, which may start later."""
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            master = socket.create_connection(
                (own.master_ip, own.master_port), timeout=min(left, _MOST_SECONDS_A_PAIR)
            )
            if master.getsockname() != master.getpeername():
                return master, ""
            master.close()  # on loopback a socket may happen to connect to itself
        except OSError as error:
            why = reason(error)
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    return None, why


def _measure_clock(
    master: socket.socket, clock: Callable[[], float], *, deadline: float
) -> tuple[float, float]:
    """Return how far this clock is ahead of rank 0's, and half of the fastest round trip, in seconds."""
    best = (0.0, float("inf"))
    for _ in range(_ROUND_TRIPS):
        began, here = time.perf_counter(), clock()
        send(master, {"time": None}, deadline=deadline)
        there = receive(master, deadline=deadline)["time"]
        half = (time.perf_counter() - began) / 2
        best = min(best, (here + half - there, half), key=lambda pair: pair[1])
    return best


def _node_report(entry: Any) -> NodeReport:
    try:
        return NodeReport(**{**entry, "unreached": _ranks(entry["unreached"])})
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise OSError("no lab doctor of this version at the other end") from error


def _ranks(entry: Mapping[str, str]) -> dict[int, str]:
    return {int(rank): why for rank, why in entry.items()}
