"""What this machine has to give: cores and ports. No torch here, so that every command may ask."""

import contextlib
import os
import socket

from common.errors import UserError


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(start: int = 0) -> int:
    """Return the first TCP port from ``start`` on that nothing listens on (0: any)."""
    for port in range(start, 65536):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise UserError(f"no free port from {start} on: give a lower --master-port")
