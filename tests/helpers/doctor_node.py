"""Run a node of ``lab doctor`` without torch.

``find`` returns the node's findings; ``python doctor_node.py JSON`` prints them. Settings:
master_port, num_nodes, rank, timeout, facts, host, clock_ahead (seconds) and listener (open;
closed: refuses connections; deaf: drops them).
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.utils.network import listen
from lab.doctor.check_result import CheckRequest
from lab.doctor.node_exchange import connect_nodes
from lab.doctor.node_findings import results_of


class Closed:
    """A bound socket that refuses connections, like a firewall that rejects packets."""

    def __init__(self, address):
        self._listener = socket.socket()
        self._listener.bind(address)

    def getsockname(self):
        return self._listener.getsockname()

    def settimeout(self, seconds):
        self._seconds = seconds

    def accept(self):
        time.sleep(self._seconds)  # like a socket to which nobody connects
        raise TimeoutError

    def close(self):
        self._listener.close()


class Deaf(Closed):
    """A socket whose queue is full, so that the kernel drops packets like a firewall."""

    def __init__(self, address):
        super().__init__(address)
        self._listener.listen(0)
        self._clients = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", self._listener.getsockname()[1]))
            self._clients.append(client)

    def close(self):
        for one in (*self._clients, self._listener):
            one.close()


def find(settings):
    """Run the node and return its results by name."""
    ahead = settings.get("clock_ahead", 0.0)
    listeners: dict[str, Callable[[str, int], Any]] = {
        "open": listen,
        "closed": lambda *address: Closed(address),
        "deaf": lambda *address: Deaf(address),
    }
    request = CheckRequest(
        "127.0.0.1",
        settings["master_port"],
        settings["num_nodes"],
        settings["rank"],
        dataset="digits",
        data_dir=Path(),
        output_dir=Path(),
        timeout_seconds=settings["timeout"],
    )
    nodes, problems = connect_nodes(
        request,
        settings.get("facts", {}),
        host=settings.get("host"),
        clock=lambda: time.time() + ahead,
        open_listener=listeners[settings.get("listener", "open")],
    )
    return {result.name: asdict(result) for result in results_of(request, nodes, problems)}


if __name__ == "__main__":
    print(json.dumps(find(json.loads(sys.argv[1]))))
    assert "torch" not in sys.modules
