"""Read regular files, and write files whole or not at all.

Only regular files are read or replaced: a FIFO would block, and a rename over a device would take
it away. A symbolic link is followed: the file that it leads to is written.

``remove_unfinished`` deletes the files that killed writers left, but none that is still being
written: a writer locks its unfinished file, and the kernel releases the lock however the process
ends.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from common.errors import UserError, file_errors
from common.utils.file_lock import lock_open_file

_UNFINISHED = ".unfinished"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


def read_regular(
    path: Path,
    *,
    most_bytes: int | None = None,
    last_bytes: int | None = None,
    follow: bool = True,
) -> bytes:
    """Return the content of a regular file, or its ``last_bytes``.

    Raises FileNotFoundError if it is missing, UserError if it is a FIFO, a device, a folder, larger
    than ``most_bytes``, or cannot be read. Without ``follow`` also if it is a link: a stranger's
    may lead to what only this process may read.
    """
    with file_errors(f"{path} cannot be read", passing=FileNotFoundError):
        status = os.stat(path, follow_symlinks=follow)
        _check_regular(path, status)  # before it is opened: a FIFO would wait for a writer
        if most_bytes is not None and status.st_size > most_bytes:
            raise UserError(
                f"{path} has {status.st_size:,} bytes, and at most {most_bytes:,} are read: "
                "it is not the file that belongs here"
            )
        flags = os.O_RDONLY | os.O_NONBLOCK  # else a FIFO put here since the check would block
        if not follow:
            flags |= os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags), "rb") as file:
            if last_bytes is None:
                return file.read(most_bytes)
            file.seek(max(0, status.st_size - last_bytes))
            return file.read(last_bytes)


def regular_target(path: Path) -> Path:
    """Return the file that writing to ``path`` replaces: the end of its symbolic links.

    Raises UserError if something other than a regular file is there, OSError if the path leads
    through a file or a loop of links.
    """
    target = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, os.stat(target))
    return target


def refuse_links(folder: Path, paths: Iterable[Path]) -> None:
    """Raise UserError if a path in ``folder`` leads elsewhere, or to a FIFO or a device.

    The folder may come from somebody else. The links on the way to it are the user's own.
    """
    for path in paths:
        place = os.path.join(os.path.realpath(folder), path.relative_to(folder))
        is_usual = path.is_file() or path.is_dir() or not path.exists()
        if os.path.realpath(path) != place or not is_usual:
            raise UserError(
                f"{path} leads elsewhere through a link, or is no regular file: remove it, or copy "
                "the folder again without links"
            )


def check_folder(path: Path) -> None:
    """Raise UserError if something other than a folder is at ``path``; it may be missing."""
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"{path} is not a folder: give the path of a folder")


def whole_lines(path: Path, *, most_bytes: int | None = None, follow: bool = True) -> list[bytes]:
    """Return the lines of a file, each with its end, without a last one that is not whole.

    Its writer is still writing, was killed, or the disk was full. Raises as ``read_regular``.
    """
    lines = read_regular(path, most_bytes=most_bytes, follow=follow).splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return lines


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UserError(f"{path} is {kind}, not a regular file: give the path of a file")


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all, even if the machine crashes or the disk is full.

    First remove the unfinished files of killed writers from its folder: they would fill the disk.
    Raises UserError if the file cannot be written.
    """
    with file_errors(
        f"{path} could not be written",
        ": make room or permit writing there, or choose another place; earlier files are untouched",
    ):
        path = regular_target(path)
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
        _sync_folder(path.parent)


def append_text(path: Path, text: str, *, name: str, advice: str = "", sync: bool = False) -> None:
    """Append to a file, and make its folder if that is missing.

    A line appended in one call survives the end of the process; with ``sync`` the whole file also
    survives a crash of the machine.

    Raises UserError with ``name`` and ``advice`` if the file cannot be written.
    """
    with file_errors(f"{name} could not be written", advice):
        path = regular_target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(text.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
                _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files whose writers have ended; none if the folder has no locks.

    An empty one stays: its writer may be about to lock it.
    """
    for path in Path(folder).glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            writer_has_ended = lock_open_file(file)
            if writer_has_ended and path.stat().st_size > 0:
                path.unlink()


def _open_unfinished(path: Path) -> IO[bytes]:
    """Return a new file beside ``path``, locked by this process."""
    file = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}").open("xb")
    with contextlib.suppress(OSError):  # a file system without locks: nothing is removed either
        lock_open_file(file, wait=True)  # another process may just be looking for unfinished files
    return file
