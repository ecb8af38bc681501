"""What this machine has to give: cores, ports, and memory that a process keeps between steps. No torch here."""

import contextlib
import ctypes
import os
import socket
import sys

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


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_NEVER = 2**31 - 1


def tune_malloc() -> bool:
    """Make glibc keep what is freed for the next allocation; return whether it could be set (Linux with glibc).

    By default each large tensor is mapped anew in every step, and the kernel fills its pages with zeros one by one, as
    they are touched. A step of VGG-11 allocates some 1 GB; without this, it takes about a sixth longer on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
