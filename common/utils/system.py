"""What this machine offers: cores, ports, open files, functions of the C library.

No torch here. Everything that only Linux has is in this module. On other systems each function
returns what it can, and ``missing_features`` says what is different there.
"""

import contextlib
import ctypes
import os
import resource
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import UserError

_M_TRIM_THRESHOLD = -1  # <malloc.h>
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def missing_features() -> list[str]:
    """Return a sentence on each feature that this system lacks; none on Linux with glibc."""
    missing = []
    if libc_function("prctl") is None:
        missing.append(
            "Child processes are not killed with their parent: after a crash, end them by hand."
        )
    if libc_function("mallopt") is None:
        missing.append(
            "Freed memory is returned to the system after each step: steps may be slower."
        )
    if not hasattr(os, "SCHED_BATCH"):
        missing.append("Ranks may interrupt each other: more ranks than cores are slower.")
    if not hasattr(os, "sched_getaffinity"):
        missing.append("CPU affinity is unknown: all cores of the machine are counted.")
    return missing


def libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if it lacks the function, as off Linux."""
    return getattr(ctypes.CDLL(None), name, None)


def lines_of(path: str) -> list[str]:
    """Return the lines of a file below /proc; none if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def allow_most_descriptors() -> None:
    """Raise this process's limit of open files and sockets as far as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def usable_cores() -> int:
    """Return how many cores this process may use; all cores if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port(start: int = 0, *, address: str = "") -> int:
    """Return the first TCP port from ``start`` on that nothing listens on.

    start : 0: a random one below those that the system gives to connections, one of which could
        take the port before it is used. address : of this machine; "" for all of them.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(start or 10_000 + secrets.randbelow(20_000), 65536):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return probe.getsockname()[1]
    raise UserError(f"no free port from {start} on: give a lower --master-port")


def tune_malloc() -> bool:
    """Make glibc keep freed memory for the next allocation; return whether that worked.

    By default each large tensor is mapped anew in every step, and the kernel fills its pages with
    zeros when they are first touched. A step of VGG-11 allocates about 1 GB; without this setting
    it takes about a sixth longer on a CPU.
    """
    mallopt = libc_function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


@contextlib.contextmanager
def batch_scheduling(wanted: bool) -> Iterator[None]:
    """Put this thread under SCHED_BATCH in the context, if ``wanted``; what it starts inherits it.

    For more ranks than cores; on Linux. Such a thread waits for the end of a time slice or for an
    idle core, and does not interrupt another when it wakes. Without it Gloo's thread that reads the
    sockets interrupts a sending thread, which holds the connection's lock, and then polls until its
    own slice ends, up to 4 ms later. Ranks with a core each would lose next to other programs: a
    step with many messages then takes up to twice as long. [sched(7); benchmarks/gloo_threads.py]
    """
    # The user may have chosen another one.
    if not (wanted and hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER):
        yield
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
