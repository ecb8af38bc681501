"""Lock files against other processes: the one place that does.

``lock_file`` takes a file that exists for its lock alone. ``lock_open_file`` locks a file that is
being written, or learns whether it is. The kernel releases both locks however their process ends.
"""

import fcntl
from pathlib import Path
from typing import IO, TYPE_CHECKING

from common.errors import reason_of

if TYPE_CHECKING:
    from filelock import BaseFileLock

FOR_EVER = -1.0
"""``lock_file`` waits until the other process has released the lock."""


def lock_file(path: Path, *, wait_seconds: float, name: Path, advice: str) -> "BaseFileLock":
    """Lock the file ``path`` and return the lock, to be released.

    On a file system without locks, prints a warning with ``name`` and ``advice``, and locks
    nothing. Raises TimeoutError if another process still holds the lock after ``wait_seconds``.
    """
    # Here, since atomic_files.py is imported by every program, and most lock nothing.
    from filelock import FileLock

    from common.utils.progress import console

    # Not filelock's soft lock, which is a file: that of a killed process would stay locked.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait_seconds)
    except TimeoutError:
        raise
    except OSError as error:
        console.print(
            f"warning: {name} cannot be locked ({reason_of(error)}): {advice}", markup=False
        )
    return lock


def lock_open_file(file: IO[bytes], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; return False if another process holds the lock and ``wait`` is False.

    A child that inherits the file holds the lock as well, until both have closed it.

    shared : allow other shared locks, so that readers who only ask whether a writer has the file
        do not take each other for one. Over NFS a file open for reading takes no other lock.
    Raises OSError on a file system without locks.
    """
    # Not filelock's lock_descriptor, which makes the same call: it knows no shared lock, and
    # importing it takes 0.1 s, which every process that writes a file would pay.
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        kind |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    return True
