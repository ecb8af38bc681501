"""The lock on the folder of a run or a comparison: one process at a time writes there.

``lock_folder`` takes it, and the kernel releases it however its process ends. Readers take none.

What is promised: flock holds between the processes of one host. Linux passes flock on NFS to the
server as a lock on the file, so it also holds between hosts, unless the folder is mounted with
``nolock`` or ``local_lock``. If a host is lost, an NFSv4 server releases its locks when the lease
ends, by default after 90 s; an NFSv3 server when that host has started again. On a file system
without flock, e.g. Lustre without that mount option, ``lock_folder`` warns and locks nothing.
"""

import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from common.errors import UserError, reason_of
from common.utils.atomic_files import read_regular, regular_target
from common.utils.progress import console
from common.utils.typed_json import Count

_LOCK = ".lock"  # hidden: lab collect and the reports leave it out
_MOST_BYTES = 1000
_Word = Annotated[str, Meta(pattern=r"^[\w.:-]{1,255}$")]  # safe to print


class _Holder(msgspec.Struct):
    """What a lock file says; ``run`` is equal on all nodes of a run."""

    run: _Word
    host: _Word
    pid: Count
    since: _Word


@contextlib.contextmanager
def lock_folder(folder: Path, *, advice: str, run: str | None = None) -> Iterator[str]:
    """Hold the lock on ``folder``, and yield the random name that the lock file gives the run.

    run : the name, if another rank of the same run has made it.
    advice : the end of the message, after "wait until it ends, or".
    Raises UserError that names the holder if another process has the lock.
    """
    path = folder / _LOCK
    run = run or secrets.token_hex(8)
    with _locked_file(path, advice) as file:
        holder = _Holder(run, socket.gethostname(), os.getpid(), f"{datetime.now():%FT%T}")
        file.truncate(0)
        file.write(msgspec.json.encode(holder))
        file.flush()
        os.fsync(file.fileno())  # other hosts see it now
        try:
            yield run
        finally:
            path.unlink(missing_ok=True)  # before closing the file releases the lock


def is_locked_by(folder: Path, run: str) -> bool:
    """Return whether the lock file in ``folder`` is of this run: its writer sees the same disk."""
    holder = _read_holder(folder / _LOCK)
    return holder is not None and holder.run == run


def _locked_file(path: Path, advice: str) -> IO[bytes]:
    while True:
        file = regular_target(path).open("a+b")  # not "wb", which would erase the holder
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UserError(
                f"{path.parent} is in use by {_describe(_read_holder(path))}: wait until it ends, "
                f"or {advice}"
            ) from error
        except OSError as error:
            console.print(
                f"warning: {path.parent} cannot be locked ({reason_of(error)}): do not start "
                "another run in it",
                markup=False,
            )
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # its holder removed it before it was locked here


def _read_holder(path: Path) -> _Holder | None:
    """Return what a lock file says; None if it is missing, or not whole yet."""
    with contextlib.suppress(FileNotFoundError, UserError, msgspec.DecodeError):
        return msgspec.json.decode(read_regular(path, most_bytes=_MOST_BYTES), type=_Holder)
    return None


def _describe(holder: _Holder | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder.pid} on {holder.host} since {holder.since.replace('T', ' ')}"
