"""A node of a meeting for tests: ``find`` meets as told; ``python doctor_node.py JSON`` prints what it found as JSON. No torch.

Told: master_port, num_nodes, rank, timeout, facts, clock_ahead (seconds), door ("open", "closed": refuses, "deaf": swallows).
"""

import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lab.doctor.meeting import NodePlace, connect_nodes
from lab.doctor.nodes import results_of
from lab.doctor.wire import listen


def closed() -> socket.socket:
    """A door that is bound and refuses: what a firewall does that rejects."""
    door = socket.socket()
    door.bind(("", 0))
    return door


class Deaf:
    """A door whose queue is full, so that the kernel drops what comes: what a firewall does that swallows packets."""

    def __init__(self) -> None:
        self._door = socket.socket()
        self._door.bind(("", 0))
        self._door.listen(0)
        self._inside = []
        for _ in range(4):
            visitor = socket.socket()
            visitor.setblocking(False)
            visitor.connect_ex(("127.0.0.1", self._door.getsockname()[1]))
            self._inside.append(visitor)

    def getsockname(self) -> tuple[str, int]:
        return self._door.getsockname()

    def settimeout(self, seconds: float) -> None:
        self._seconds = seconds

    def accept(self) -> tuple[socket.socket, object]:
        time.sleep(self._seconds)  # as a socket to which nobody comes
        raise TimeoutError

    def close(self) -> None:
        for one in (*self._inside, self._door):
            one.close()


def find(told: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return what a node found, by name."""
    ahead = told.get("clock_ahead", 0.0)
    meeting = connect_nodes(
        NodePlace("127.0.0.1", told["master_port"], told["num_nodes"], told["rank"]),
        told.get("facts", {}),
        timeout_seconds=told["timeout"],
        host=told.get("host"),
        clock=lambda: time.time() + ahead,
        door={"open": listen, "closed": closed, "deaf": Deaf}[told.get("door", "open")],
    )
    return {result.name: asdict(result) for result in results_of(meeting)}


if __name__ == "__main__":
    print(json.dumps(find(json.loads(sys.argv[1]))))
    assert "torch" not in sys.modules
