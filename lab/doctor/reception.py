"""Rank 0's side of the first exchange: ``Reception`` greets the nodes that connect, side by side.

Everyone who reaches the port can connect, so each connection has a limit of time and each address a
limit of connections. A stranger does not delay the nodes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from common.errors import UserError
from common.utils.typed_json import Finite, Rank, Ranks, Text, convert
from lab.doctor.connectivity import receive, seconds_until, send
from lab.facts import Facts, check_facts

HELLO_SECONDS = 3.0
ROUND_TRIPS = 8

_POLL_SECONDS = 0.2
_MOST_GUESTS = 512
_GUESTS_BESIDE_NODES = 16  # of one address, at which all nodes may be


@dataclass(frozen=True)
class NodeReport:
    """What one node reports about itself. The field names are keys of the messages between nodes.

    address, port : where it answers probes. facts : plain values by name.
    clock : how far its clock is ahead of rank 0's, and the uncertainty, in seconds; None on rank 0.
    unreached : the ranks that this node did not reach, each with the reason.
    """

    rank: Rank
    host: Text
    address: Text
    port: Annotated[int, Meta(ge=1, le=65_535)]
    facts: Facts
    clock: tuple[Finite, Finite] | None = None
    unreached: Sequence[tuple[Rank, Text]] = ()


@dataclass(frozen=True)
class _Hello:
    num_nodes: Ranks
    node: NodeReport


def node_report(message: Mapping[str, Any]) -> NodeReport:
    """Return the report in a message. Raises UserError if it is none."""
    report = convert(message, NodeReport, name="the report")
    check_facts(report.facts, name="the report's facts")
    return report


@dataclass
class Reception:
    """Greets the nodes; ``own`` is rank 0's report.

    nodes, connections : by rank, of the nodes that have been greeted. problems : in words.
    """

    own: NodeReport
    num_nodes: int
    clock: Callable[[], float]
    nodes: dict[int, NodeReport] = field(default_factory=dict)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes[self.own.rank] = self.own
        self._claimed = dict(self.nodes)
        self._guests: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._ended = False

    def greet_all(self, listener: socket.socket, deadline: float) -> None:
        """Return once all nodes have been greeted, or at the deadline."""
        while len(self.nodes) < self.num_nodes and time.monotonic() < deadline:
            listener.settimeout(min(_POLL_SECONDS, seconds_until(deadline)))
            with contextlib.suppress(OSError):  # no connection yet, or one that has ended
                connection, (address, *_) = listener.accept()
                if self._has_room(address):
                    self._guests[connection] = address
                    soon = min(deadline, time.monotonic() + HELLO_SECONDS)
                    threading.Thread(
                        target=self._greet, args=[connection, soon], daemon=True
                    ).start()
                else:
                    connection.close()
        with self._lock:
            self._ended = True
        for guest in list(self._guests):
            with contextlib.suppress(OSError):  # its thread has just closed it
                guest.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def close(self) -> None:
        """Close the nodes' connections."""
        for connection in self.connections.values():
            connection.close()

    def _has_room(self, address: str) -> bool:
        guests = list(self._guests.values())
        most = self.num_nodes + _GUESTS_BESIDE_NODES
        return len(guests) < _MOST_GUESTS and guests.count(address) < most

    def _greet(self, connection: socket.socket, soon: float) -> None:
        # An error means another program, or a node that has gone: the node counts as missing.
        node = None
        with contextlib.suppress(OSError, UserError):
            hello = convert(receive(connection, deadline=soon), _Hello, name="the hello")
            check_facts(hello.node.facts, name="the hello's facts")
            with self._lock:
                problem = self._refusal(hello)
                if problem:
                    self.problems.append(problem)
                else:
                    node = self._claimed[hello.node.rank] = hello.node
            send(connection, {"refused": problem}, deadline=soon)
            if node is not None:
                self._answer_clock(connection, soon)
                with self._lock:
                    if not self._ended:
                        self.connections[node.rank] = connection
                        self.nodes[node.rank] = node
        with self._lock:
            del self._guests[connection]
            if node is not None and node.rank not in self.nodes:
                del self._claimed[node.rank]
        if connection not in self.connections.values():
            connection.close()

    def _answer_clock(self, connection: socket.socket, soon: float) -> None:
        for _ in range(ROUND_TRIPS):
            receive(connection, deadline=soon)
            send(connection, {"time": self.clock()}, deadline=soon)

    def _refusal(self, hello: _Hello) -> str:
        """Return why rank 0 refuses the node; "" if it accepts it."""
        node = hello.node
        if hello.num_nodes != self.num_nodes or node.rank >= self.num_nodes:
            return (
                f"rank {node.rank} was started with --num-nodes {hello.num_nodes}, "
                f"rank 0 with {self.num_nodes}"
            )
        if node.rank in self._claimed:
            first = self._claimed[node.rank].host
            return f"rank {node.rank} was started twice: on {first} and on {node.host}"
        return ""
