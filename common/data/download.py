"""Download a file and show how much has arrived: ``fetch``, and ``lock_for_download``."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.utils.atomic_files import regular_target
from common.utils.progress import Counter, console

_STALL_SECONDS = 60.0
_SILENT_SECONDS = 3.0
_CHUNK_BYTES = 2**18
_MEGABYTE = 1e6


@contextmanager
def lock_for_download(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file ``path``; say so if another process of this machine holds it for long."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_SILENT_SECONDS)
    except Timeout:
        console.print(f"waiting for another process that downloads {name} to {path.parent}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch(url: str, path: Path) -> None:
    """Write what ``url`` sends to ``path``. The caller checks the content.

    Raises OSError, ValueError or http.client.HTTPException. Gives up on a host that sends nothing
    for a minute.
    """
    target = regular_target(path)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_SECONDS)  # urllib alone would wait for ever
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "data-parallel-lab"})
        with urllib.request.urlopen(request) as response, target.open("wb") as file:
            length = response.headers.get("Content-Length")
            total = round(int(length) / _MEGABYTE) if length is not None else None
            size = f" ({total:,} MB)" if total else ""
            console.print(f"downloading {url}{size} to {path.parent}", markup=False)
            arrived = 0
            with Counter(f"download of {path.name}", total=total, unit="MB") as counter:
                while chunk := response.read(_CHUNK_BYTES):
                    file.write(chunk)
                    arrived += len(chunk)
                    counter.show(round(arrived / _MEGABYTE))
    finally:
        socket.setdefaulttimeout(before)
