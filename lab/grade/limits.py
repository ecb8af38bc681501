"""The limits of a sandbox that the kernel does not keep: of its memory, and of its records.

``watch`` looks at a run four times a second, and ends it when it uses too much. Memory is what its
processes use, the files in its folders, which lie in memory, and files that are in no folder
(``memfd_create``). All parts of a user that run on this machine note what they use in one file:
when the machine's memory is full, only the part that uses the most is ended.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import psutil

from common.errors import UserError
from common.utils.file_lock import lock_open_file
from common.utils.processes import descendants
from common.utils.typed_json import Bytes, decode, encode

_WATCH_SECONDS = 0.25
_MOST_RECORDS = 20_000  # files
_MOST_OF_MACHINE = 95.0  # percent of all memory: also of what no process maps
# A part that ends holds memory for a while: until its note is older than this no other part ends.
_NOTE_SECONDS = 10.0
_ENDS = 2.0**60  # bytes in the note of a part that is ended: it is the largest


class _Note(msgspec.Struct):
    """What a part uses.

    at : when it was written; seconds of ``time.monotonic``, one clock for all.
    """

    used_bytes: Bytes
    at: float


@dataclass(frozen=True)
class Watched:
    """A sandbox to watch.

    Parameters
    ----------
    first : the id of its first process.
    folders : its folders that lie in memory, open. ``watch`` closes them.
    records : the folder of the records.
    memory_bytes, disk_bytes : of all its processes together.
    """

    first: int
    folders: Sequence[int]
    records: Path
    memory_bytes: int
    disk_bytes: int


def watch(watched: Watched, over: threading.Event, ended: list[str]) -> None:
    """Wait until ``over`` is set; end the sandbox before, and say why, if it uses too much.

    ended : gets the reason, a clause with its subject.
    """
    full_since = None
    while True:
        is_last = over.is_set()  # it looks once more at the end
        if not _machine_is_full():
            full_since = None
        elif full_since is None:
            full_since = time.monotonic()
        reason = _too_much(watched, full_since)
        if reason or is_last:
            break
        over.wait(_WATCH_SECONDS)
    for folder in watched.folders:  # an open one keeps its memory
        os.close(folder)
    if reason:
        ended.append(reason)
        with contextlib.suppress(psutil.Error):
            psutil.Process(watched.first).kill()


def _too_much(watched: Watched, full_since: float | None) -> str | None:
    """Return of what the sandbox uses too much; None if of nothing.

    full_since : when this machine's memory was first seen to be full; None if it is not.
    """
    of_processes, in_no_folder = _used_by_processes()
    in_files = in_no_folder + sum(map(_used_in, watched.folders))
    used_bytes = of_processes + in_files
    if used_bytes > watched.memory_bytes:
        return (
            f"it used more than {_gb(watched.memory_bytes)} of memory: {_gb(of_processes)} in "
            f"processes, {_gb(in_files)} in files, which lie in memory"
        )
    if _is_to_end(used_bytes, full_since):
        return f"the machine's memory was full, and this part used the most: {_gb(used_bytes)}"
    space = os.statvfs(watched.records)
    # A probe that finds no room would fail unexplained.
    has_no_room = space.f_bavail < space.f_blocks / 20
    if has_no_room or space.f_files - space.f_ffree > _MOST_RECORDS:
        return f"it wrote more than {_gb(watched.disk_bytes)} of records"
    return None


def _gb(count: float) -> str:
    return f"{count / 2**30:.3g} GB"


# --- what a sandbox uses ---


def _used_by_processes() -> tuple[int, int]:
    """Return the memory of the processes that this one has in namespaces of their own.

    The second number is that of files in no folder, which they hold open. What they map of a file
    in memory counts twice: with data loaders, some MB.
    """
    mapped = 0
    unnamed: dict[int, int] = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                # What forked loaders share with their rank counts once.
                mapped += psutil.Process(pid).memory_full_info().pss
                unnamed |= _unnamed_files(pid)
    return mapped, sum(unnamed.values())


def _unnamed_files(pid: int) -> dict[int, int]:
    """Return the bytes of the files in no folder that a process holds open, by their inodes."""
    found: dict[int, int] = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            path = f"/proc/{pid}/fd/{name}"
            if os.readlink(path).startswith("/memfd:"):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512
    return found


def _used_in(folder: int) -> int:
    """Return the bytes of all files on the file system of an open folder, also of removed ones."""
    space = os.fstatvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


# --- what all parts use ---


def _machine_is_full() -> bool:
    return psutil.virtual_memory().percent > _MOST_OF_MACHINE


def _is_to_end(used_bytes: int, full_since: float | None) -> bool:
    """Note what this part uses; return whether it is the one to end on a full machine.

    It is once all others have noted, since the machine is full, that they use no more. Where notes
    cannot be written, every part is.
    """
    path = Path(tempfile.gettempdir()) / f"lab-grade-{os.geteuid()}.json"
    own = str(os.getpid())
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode=0o600)
        with os.fdopen(descriptor, "r+b") as file:
            # Without the lock two parts may each find themselves the largest.
            lock_open_file(file, wait=True)
            notes = _read_notes(file)
            notes.pop(own, None)
            ends = full_since is not None and all(
                note.at >= full_since and note.used_bytes <= used_bytes for note in notes.values()
            )
            notes[own] = _Note(_ENDS if ends else used_bytes, time.monotonic())
            file.seek(0)
            file.truncate()
            file.write(encode(notes))
    except OSError:
        return full_since is not None
    return ends


def _read_notes(file: IO[bytes]) -> dict[str, _Note]:
    """Return the notes that count, by the process that wrote each."""
    now = time.monotonic()
    try:
        notes = decode(file.read(), dict[str, _Note], name=file.name)
    except UserError:  # it is new, or its last writer was killed
        return {}
    # A later one is from before the machine's last start.
    return {name: note for name, note in notes.items() if now - _NOTE_SECONDS < note.at <= now}
