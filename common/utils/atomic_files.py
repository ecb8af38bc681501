"""Write files whole or not at all.

``remove_unfinished`` deletes the files that killed writers left, but none that is still being
written: a writer locks its unfinished file, and the kernel releases the lock however the process
ends.
"""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from common.errors import UserError, reason_of

_UNFINISHED = ".unfinished"


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all, even if the machine crashes or the disk is full.

    First remove the unfinished files of killed writers from its folder: they would fill the disk.
    Raises UserError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        with _open_unfinished(path) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)  # before closing the file releases the lock
            finally:
                Path(file.name).unlink(missing_ok=True)  # gone already, unless writing failed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({reason_of(error)}): make room or permit writing there, "
            "or give another --output-dir; earlier files are untouched"
        ) from error


def append_text(path: Path, text: str, *, name: str, advice: str = "") -> None:
    """Append to a file, and make its folder if that is missing.

    Raises UserError with ``name`` and ``advice`` if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{name} could not be written ({reason_of(error)}){advice}") from error


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files whose writers have ended; none if the folder has no locks."""
    for path in Path(folder).glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its writer lives
            path.unlink()


def _open_unfinished(path: Path) -> IO[bytes]:
    """Return a new file beside ``path``, locked by this process."""
    while True:
        name = f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}"
        file = path.with_name(name).open("xb")
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):  # else another writer removed it before it was locked
            return file
        file.close()
