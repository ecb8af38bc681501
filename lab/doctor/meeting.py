"""The nodes' doctors meet: rank 0 listens at the master's port, each other one comes, then each connects to each, as Gloo does.

``connect_nodes`` on every node. In order: a guest says who it is, measures its clock against rank
0's, gets the list of all, knocks at the door of each (crossing.py), tells rank 0 what it found, and
gets what all found. So every node ends with the same Meeting.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lab.doctor.check_result import reason
from lab.doctor.crossing import ProbeServer, cross
from lab.doctor.network import route_to
from lab.doctor.wire import accept, listen, receive, send

_HELLO_SECONDS = 3.0
_MOST_SECONDS_A_PAIR = 5.0
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_ROUND_TRIPS = 8


@dataclass(frozen=True)
class NodePlace:
    """Where this node stands, as the parts' flags say it."""

    master_ip: str
    master_port: int
    num_nodes: int
    rank: int


@dataclass(frozen=True)
class NodeReport:
    """What one node told.

    address, port : of the door at which the others knock. facts : plain values by name. clock_seconds : how far its clock is
    ahead of rank 0's, give or take ``uncertainty_seconds``, half of the fastest round trip; None for rank 0. unreached : by
    rank, why this node did not reach that one.
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
class Meeting:
    """Who came, by rank, and what went wrong; ``problems`` in words. ``nodes`` is empty where this node met nobody."""

    place: NodePlace
    nodes: Mapping[int, NodeReport]
    problems: tuple[str, ...] = ()

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(self.place.num_nodes) if rank not in self.nodes]


def connect_nodes(
    place: NodePlace,
    facts: Mapping[str, Any],
    *,
    timeout_seconds: float,
    host: str | None = None,
    clock: Callable[[], float] = time.time,
    door: Callable[[], socket.socket] = listen,
) -> Meeting:
    """Meet the other nodes' doctors and return what all of them found.

    ``timeout_seconds`` to wait for the others; the whole takes at most twice that and some 20 s. ``door`` opens the socket at
    which the others knock. Raises OSError on rank 0 where the master's port cannot be had, elsewhere only without a route.
    """
    with ProbeServer(place.rank, door()) as doorman:
        me = NodeReport(
            place.rank,
            host or socket.gethostname(),
            route_to(place.master_ip),
            doorman.port,
            dict(facts),
        )
        if place.rank == 0:
            return _receive_guests(place, me, timeout_seconds, clock=clock)
        return _visit(place, me, timeout_seconds, clock=clock)


def _receive_guests(
    place: NodePlace, me: NodeReport, timeout_seconds: float, *, clock: Callable[[], float]
) -> Meeting:
    deadline = time.monotonic() + timeout_seconds
    nodes, guests, problems = {0: me}, {}, []
    with contextlib.ExitStack() as stack:
        entrance = stack.enter_context(listen(place.master_port))
        while len(nodes) < place.num_nodes and time.monotonic() < deadline:
            guest = accept(entrance, deadline=deadline)
            if guest is None:
                break
            stack.enter_context(guest)
            with contextlib.suppress(
                OSError, KeyError, TypeError
            ):  # a stranger, or a guest that has gone: it counts as missing
                node, problem = _greet(guest, place, nodes, deadline, clock=clock)
                if problem:
                    problems.append(problem)
                if node is not None:
                    nodes[node.rank], guests[node.rank] = node, guest
        limit = min(_MOST_SECONDS_A_PAIR, timeout_seconds)
        list_of_all = {str(rank): [node.address, node.port] for rank, node in nodes.items()}
        for guest in guests.values():
            with contextlib.suppress(OSError):
                send(
                    guest,
                    {"doors": list_of_all, "seconds": limit},
                    deadline=time.monotonic() + _HELLO_SECONDS,
                )
        nodes[0] = replace(me, unreached=cross(0, _doors(nodes), limit))
        deadline = time.monotonic() + limit + _GRACE_SECONDS
        for rank, guest in guests.items():
            try:
                nodes[rank] = replace(
                    nodes[rank], unreached=_ranks(receive(guest, deadline=deadline)["unreached"])
                )
            except (OSError, KeyError):
                problems.append(f"rank {rank} came and left before it had told what it reached")
        end = {"nodes": [asdict(node) for node in nodes.values()], "problems": problems}
        for guest in guests.values():
            with contextlib.suppress(OSError):
                send(guest, end, deadline=time.monotonic() + _HELLO_SECONDS)
    return Meeting(place, nodes, tuple(problems))


def _greet(
    guest: socket.socket,
    place: NodePlace,
    nodes: Mapping[int, NodeReport],
    deadline: float,
    *,
    clock: Callable[[], float],
) -> tuple[NodeReport | None, str]:
    """Hear who comes and answer its questions for the time; return the node, or None and why it cannot stay."""
    soon = min(deadline, time.monotonic() + _HELLO_SECONDS)
    hello = receive(guest, deadline=soon)
    node, num_nodes, problem = _node_report(hello.get("node")), hello.get("num_nodes"), ""
    if num_nodes != place.num_nodes:
        problem = f"rank {node.rank} was started with --num-nodes {num_nodes}, rank 0 with {place.num_nodes}"
    elif not 0 <= node.rank < num_nodes:
        problem = f"a node came as rank {node.rank} of {num_nodes}"
    elif node.rank in nodes:
        problem = (
            f"rank {node.rank} was started twice: on {nodes[node.rank].host} and on {node.host}"
        )
    send(guest, {"refused": problem, "wait": deadline - time.monotonic()}, deadline=soon)
    if problem:
        return None, problem
    for _ in range(_ROUND_TRIPS):
        receive(guest, deadline=soon)
        send(guest, {"time": clock()}, deadline=soon)
    told = receive(guest, deadline=soon)
    return replace(
        node, clock_seconds=told["clock_seconds"], uncertainty_seconds=told["uncertainty_seconds"]
    ), ""


def _visit(
    place: NodePlace, me: NodeReport, timeout_seconds: float, *, clock: Callable[[], float]
) -> Meeting:
    deadline, where = time.monotonic() + timeout_seconds, f"{place.master_ip}:{place.master_port}"
    master, why = _reach(place, deadline)
    if master is None:
        return Meeting(
            place,
            {},
            (
                f"rank {place.rank} did not reach rank 0 at {where} within {timeout_seconds:g} s ({why})",
            ),
        )
    with master:
        try:
            send(master, {"num_nodes": place.num_nodes, "node": asdict(me)}, deadline=deadline)
            answer = receive(master, deadline=deadline + _GRACE_SECONDS)
            if answer["refused"]:
                return Meeting(place, {}, (answer["refused"],))
            ahead, uncertainty = _measure_clock(
                master, clock, deadline=time.monotonic() + _GRACE_SECONDS
            )
            send(
                master,
                {"clock_seconds": ahead, "uncertainty_seconds": uncertainty},
                deadline=time.monotonic() + _GRACE_SECONDS,
            )
            wait = min(answer["wait"], timeout_seconds) + _GRACE_SECONDS
            doors = receive(master, deadline=time.monotonic() + wait)
            unreached = cross(
                place.rank,
                {int(rank): tuple(door) for rank, door in doors["doors"].items()},
                doors["seconds"],
            )
            soon = time.monotonic() + doors["seconds"] + 2 * _GRACE_SECONDS
            send(master, {"unreached": unreached}, deadline=soon)
            end = receive(master, deadline=soon)
            nodes = [_node_report(entry) for entry in end["nodes"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            return Meeting(
                place, {}, (f"what answers at {where} is no lab doctor of this version",)
            )
        except OSError as error:
            return Meeting(
                place,
                {},
                (
                    f"rank {place.rank} reached {where}, but no lab doctor answered to the end "
                    f"({reason(error)})",
                ),
            )
    return Meeting(place, {node.rank: node for node in nodes}, tuple(end["problems"]))


def _reach(place: NodePlace, deadline: float) -> tuple[socket.socket | None, str]:
    """Connect to rank 0, which may start later."""
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            master = socket.create_connection(
                (place.master_ip, place.master_port), timeout=min(left, _MOST_SECONDS_A_PAIR)
            )
            if master.getsockname() != master.getpeername():
                return master, ""
            master.close()  # on loopback a socket may happen to meet itself
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


def _doors(nodes: Mapping[int, NodeReport]) -> dict[int, tuple[str, int]]:
    return {rank: (node.address, node.port) for rank, node in nodes.items()}
