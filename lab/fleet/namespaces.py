"""Enter namespaces that a process holds: with a command, or with this process."""

import ctypes
import os
from pathlib import Path


def enter_words(pid: int, *kinds: str) -> list[str]:
    """Return the words before a command that start it in the namespaces of a process.

    kinds : of namespaces, as flags of ``nsenter``. The process's users come as well, where they are
        not this process's own.

    Raises OSError if the process has ended, or is another user's.
    """
    same_users = Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user")
    users = [] if same_users else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *users, *kinds, "--"]


def enter_namespace(path: Path) -> None:
    """Move this process into a namespace: a file of ``/proc/PID/ns`` or of ``ip netns``.

    Raises OSError if the kernel refuses. (Python has ``os.setns`` since 3.12 only.)
    """
    with path.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
