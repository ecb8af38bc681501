"""The lock on the folder of a run or a comparison: one process at a time writes there.

``lock_folder`` takes it, and the kernel releases it however its process ends. Readers take none.

What is promised: flock holds between the processes of one host. Linux passes flock on NFS to the
server as a lock on the file, so it also holds between hosts, unless the folder is mounted with
``nolock`` or ``local_lock``. If a host is lost, an NFSv4 server releases its locks when the lease
ends, by default after 90 s; an NFSv3 server when that host has started again. On a file system
without flock, e.g. Lustre without that mount option, ``lock_folder`` warns and locks nothing.
"""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil

from common.errors import UserError, file_errors
from common.utils.atomic_files import read_regular, regular_target
from common.utils.file_lock import lock_file

_LOCK = ".lock"  # hidden: lab collect and the reports leave it out
_CONTENT = re.compile(r"(\w+)\n(process \d+ on [\w.:-]{1,255} since [\d :-]{19})\n", re.ASCII)


@contextlib.contextmanager
def lock_folder(folder: Path, *, advice: str, run: str | None = None) -> Iterator[str]:
    """Hold the lock on ``folder``, and yield the random name that the lock file gives the run.

    run : the name, if another rank of the same run has made it.
    advice : the end of the message, after "wait until it ends, or".
    Raises UserError that names the holder if another process has the lock.
    """
    path = regular_target(folder / _LOCK)
    run = run or secrets.token_hex(8)
    try:
        lock = lock_file(path, wait_seconds=0, name=folder, advice="do not start another run in it")
    except TimeoutError as error:
        _, holder = _read(path)
        raise UserError(
            f"{folder} is in use by {holder}: wait until it ends, or {advice}"
        ) from error
    try:
        holder = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}"
        with file_errors(f"{path} could not be written"):
            path.write_text(f"{run}\n{holder}\n")  # once it is closed, other hosts see it
        yield run
    finally:
        path.unlink(missing_ok=True)  # before the release: then nobody else has locked it
        lock.release()


def is_locked_by(folder: Path, run: str) -> bool:
    """Return whether the lock file in ``folder`` is of this run: its writer sees the same disk."""
    owner, _ = _read(folder / _LOCK)
    return owner == run


def lock_holder(folder: Path) -> str:
    """Return the process that holds the lock on ``folder``, or "" if none is known to.

    A lock file whose process on this host has ended was left behind by a run that was killed.
    """
    path = folder / _LOCK
    if not path.exists():
        return ""
    _, holder = _read(path)
    found = re.match(r"process (\d+) on (\S+) ", holder)
    if found and found[2] == socket.gethostname() and not psutil.pid_exists(int(found[1])):
        return ""
    return holder


def _read(path: Path) -> tuple[str, str]:
    """Return the run and the holder that a lock file names, as far as it is whole and plain."""
    try:
        match = _CONTENT.fullmatch(read_regular(path, most_bytes=1000).decode(errors="replace"))
    except (FileNotFoundError, UserError):
        match = None
    if match is None:
        return "", "another process"
    return match[1], match[2]
