"""The nodes exchange what they find, over connections to rank 0 at the master's port.

Call ``connect_nodes`` on every node. Each node sends rank 0 its report, measures its clock against
rank 0's, receives the addresses of all nodes, connects to each of them (connectivity.py), and sends
rank 0 the completed report. Rank 0 sends all reports to all, so every node ends with the same.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from common.errors import UserError
from common.utils.network import listen, listening_address, route_to
from lab.doctor.check_result import CheckRequest, reason
from lab.doctor.connectivity import answer_probes, probe_ranks, receive, send
from lab.doctor.reception import (
    HELLO_SECONDS,
    ROUND_TRIPS,
    NodeReport,
    Reception,
    node_report,
)

_MOST_SECONDS_A_PAIR = 5.0
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 0.2


def connect_nodes(
    request: CheckRequest,
    facts: Mapping[str, Any],
    *,
    host: str | None = None,
    clock: Callable[[], float] = time.time,
    open_listener: Callable[[str, int], socket.socket] = listen,
) -> tuple[dict[int, NodeReport], list[str]]:
    """Connect to the other nodes' doctors.

    Returns the report of each node that connected, by rank (empty if this node reached no other),
    and the problems, in words.

    Waits for the others until the request's timeout; the whole exchange takes at most twice that
    plus about 20 s. ``open_listener`` opens the socket for the others. Raises OSError on rank 0
    if the master's port is taken, and on every rank if there is no route to the master.
    """
    own = route_to(request.master_ip)
    listener = open_listener(own, 0)
    with answer_probes(request.rank, listener):
        report = NodeReport(
            request.rank,
            host or socket.gethostname(),
            own,
            listener.getsockname()[1],
            dict(facts),
        )
        exchange = _collect_nodes if request.rank == 0 else _join_master
        return exchange(request, report, clock)


def _collect_nodes(
    request: CheckRequest, report: NodeReport, clock: Callable[[], float]
) -> tuple[dict[int, NodeReport], list[str]]:
    """Run the exchange on rank 0."""
    reception = Reception(report, request.num_nodes, clock)
    with contextlib.ExitStack() as stack:
        address, _ = listening_address(request.master_ip)
        listener = stack.enter_context(listen(address, request.master_port))
        stack.callback(reception.close)
        reception.greet_all(listener, time.monotonic() + request.timeout_seconds)
        nodes, connections = reception.nodes, reception.connections
        problems = reception.problems
        limit = min(_MOST_SECONDS_A_PAIR, request.timeout_seconds)
        addresses = [(node.rank, node.address, node.port) for node in nodes.values()]
        _send_to_all(connections.values(), {"addresses": addresses, "seconds": limit})
        nodes[0] = replace(report, unreached=probe_ranks(0, addresses, limit))
        deadline = time.monotonic() + limit + _GRACE_SECONDS
        for rank, connection in connections.items():
            try:
                completed = node_report(receive(connection, deadline=deadline))
                nodes[rank] = replace(completed, rank=rank)
            except (OSError, UserError):
                problems.append(f"rank {rank} left before it reported which nodes it reaches")
        _send_to_all(
            connections.values(),
            {"nodes": [asdict(node) for node in nodes.values()], "problems": problems},
        )
    return nodes, problems


def _send_to_all(connections: Iterable[socket.socket], message: Mapping[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            send(connection, message, deadline=time.monotonic() + HELLO_SECONDS)


def _join_master(
    request: CheckRequest, report: NodeReport, clock: Callable[[], float]
) -> tuple[dict[int, NodeReport], list[str]]:
    """Run the exchange on the other ranks."""
    where = f"{request.master_ip}:{request.master_port}"
    try:
        master = _reach(request, time.monotonic() + request.timeout_seconds)
    except OSError as error:
        problem = (
            f"rank {request.rank} did not reach rank 0 at {where} "
            f"within {request.timeout_seconds:g} s ({reason(error)})"
        )
        return {}, [problem]
    try:
        with master:
            return _report_to(master, request, report, clock)
    except (LookupError, TypeError, ValueError):
        return {}, [f"the program that answers at {where} is not lab doctor of this version"]
    except OSError as error:
        problem = (
            f"rank {request.rank} connected to {where}, "
            f"but lab doctor there did not finish ({reason(error)})"
        )
        return {}, [problem]


def _reach(request: CheckRequest, deadline: float) -> socket.socket:
    """Return a connection to rank 0, which may start later. Raises OSError after the deadline."""
    last_error: OSError = TimeoutError()
    while (left := deadline - time.monotonic()) > 0:
        try:
            master = socket.create_connection(
                (request.master_ip, request.master_port), timeout=min(left, _MOST_SECONDS_A_PAIR)
            )
            if master.getsockname() != master.getpeername():
                return master
            master.close()  # on loopback a socket may happen to connect to itself
        except OSError as error:
            last_error = error
            time.sleep(min(left, _RETRY_SECONDS))
    raise last_error


def _report_to(
    master: socket.socket,
    request: CheckRequest,
    report: NodeReport,
    clock: Callable[[], float],
) -> tuple[dict[int, NodeReport], list[str]]:
    """Exchange reports with rank 0.

    Raises LookupError, TypeError or ValueError for messages of another form, OSError if the
    connection breaks.
    """
    soon = time.monotonic() + request.timeout_seconds + _GRACE_SECONDS
    send(master, {"num_nodes": request.num_nodes, "node": asdict(report)}, deadline=soon)
    if refusal := receive(master, deadline=soon)["refused"]:
        return {}, [refusal]
    report = replace(report, clock=_measure_clock(master, clock))
    others = receive(master, deadline=time.monotonic() + request.timeout_seconds + _GRACE_SECONDS)
    unreached = probe_ranks(request.rank, others["addresses"], others["seconds"])
    soon = time.monotonic() + others["seconds"] + 2 * _GRACE_SECONDS
    send(master, asdict(replace(report, unreached=unreached)), deadline=soon)
    end = receive(master, deadline=soon)
    return {report.rank: report for report in map(node_report, end["nodes"])}, end["problems"]


def _measure_clock(master: socket.socket, clock: Callable[[], float]) -> tuple[float, float]:
    """Return how far this clock is ahead of rank 0's, and its uncertainty, in seconds.

    The uncertainty is half of the fastest round trip.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    measured = []
    for _ in range(ROUND_TRIPS):
        began, here = time.perf_counter(), clock()
        send(master, {}, deadline=deadline)
        there = receive(master, deadline=deadline)["time"]
        half = (time.perf_counter() - began) / 2
        measured.append((here + half - there, half))
    return min(measured, key=lambda offset: offset[1])
