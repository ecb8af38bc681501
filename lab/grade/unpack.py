"""Unpack a stranger's folder, zip or tar in a process of its own, whatever it has been made for.

``unpack`` starts this file as a program and waits: memory, processor time, bytes, files, depth and
length of names are limited, so an archive that was made to harm costs its own submission alone.
``main`` is that program. Nothing above the target is written, and no link in it leads out.
"""

import bz2
import contextlib
import gzip
import lzma
import os
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

from common.errors import UserError, reason_of
from common.say import listed
from common.utils.processes import how_ended, kill_group, start_child

MOST_BYTES = 2**30
MOST_FILES = 20_000
MOST_MEMORY = 512 * 2**20
MOST_SECONDS = 60
_DEEPEST = 64  # folders
_LONGEST_NAME = 1024  # bytes, with its folders
_LONGEST_HEADER = 2**20  # bytes that tarfile asks for at once
_MOST_MESSAGE = 2000  # characters
IGNORED = ("__MACOSX", "__pycache__", ".git", ".venv", "venv", "grades")  # the last: --self's
NO_CODE = "it has no Python file, and no notebook"
_ARCHIVES = (".zip", ".rar", ".7z", ".tgz", ".gz", ".bz2", ".xz", ".tar")
# What begins a compressed tar.
_OPENERS: Mapping[bytes, Callable[[Path], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x5d\0\0": lzma.open,
}


def unpack(
    source: Path, target: Path, environment: Mapping[str, str], *, without: Sequence[Path] = ()
) -> None:
    """Copy a submission to a new folder that everybody can read.

    environment : of the process that does it. without : folders to leave out. Raises UserError, in
    one line, for what is no submission or not harmless; then there is no such folder.
    """
    paths = [source.absolute(), target, *without]
    process = start_child(
        [sys.executable, "-P", "-s", "-m", __name__, *map(str, paths)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    with process:
        try:
            said, _ = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            kill_group(process)
    if process.returncode == 0:
        return
    # As deep as it is; what could not be removed goes with the folder of all submissions.
    shutil.rmtree(target, ignore_errors=True)
    problem = said.decode(errors="replace").strip()
    if process.returncode < 0:
        problem = f"it cannot be unpacked within {MOST_SECONDS} s"
    raise UserError(problem or f"it cannot be unpacked: that {how_ended(process.returncode)}")


def main() -> int:
    """Unpack the first argument to the second, without the others; print what is wrong."""
    _limit(resource.RLIMIT_AS, MOST_MEMORY)
    _limit(resource.RLIMIT_CPU, MOST_SECONDS)
    _limit(resource.RLIMIT_FSIZE, MOST_BYTES)
    source, target, *without = map(Path, sys.argv[1:])
    try:
        _unpack(source, target, without)
    except UserError as error:
        problem = str(error)
    except MemoryError:
        problem = f"it cannot be unpacked with {MOST_MEMORY >> 20} MB of memory"
    # What damaged archives make of the libraries: zlib.error, LZMAError, KeyError, OverflowError.
    except Exception as error:
        problem = f"it cannot be unpacked ({reason_of(error).rstrip(':')})"
    else:
        return 0
    sys.stdout.buffer.write(problem[:_MOST_MESSAGE].encode(errors="backslashreplace"))
    return 1


def _limit(what: int, most: int) -> None:
    """Limit this process, unless it is limited to less."""
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or hard > most:
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(what, (most, most))


class Entry(NamedTuple):
    """What would be unpacked or copied.

    is_link : whether it is a link in an archive.
    """

    name: str
    size: int
    is_link: bool = False


def _unpack(source: Path, target: Path, without: Sequence[Path]) -> None:
    if source.is_dir():
        _copy_folder(source, target, without)
    elif not source.is_file():
        raise UserError("it is neither a file nor a folder")
    elif zipfile.is_zipfile(source):
        _unpack_zip(source, target)
    else:
        _unpack_tar(source, target)
    _let_everybody_read(target)  # first, so that no folder hides a link
    _refuse_links_outside(target)
    if not any([*target.rglob("*.py"), *target.rglob("*.ipynb")]):
        inner = [path for path in sorted(target.rglob("*")) if path.suffix.lower() in _ARCHIVES]
        if inner:  # nobody has looked into it
            names = listed([path.relative_to(target) for path in inner])
            raise UserError(f"{NO_CODE}, but holds {names}")
        raise UserError(NO_CODE)


def _copy_folder(source: Path, target: Path, without: Sequence[Path]) -> None:
    """Copy a folder; links stay links, so that nothing outside of it is read."""
    _check(list(islice(_entries_of(source, without), MOST_FILES + 1)))

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name in IGNORED or Path(folder, name) in without]

    shutil.copytree(source, target, symlinks=True, ignore=ignored)


def _entries_of(source: Path, without: Sequence[Path]) -> Iterator[Entry]:
    """Yield what is in a folder, not deeper than may be unpacked."""
    folders = [source]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.name in IGNORED or path in without:
                continue
            found = path.lstat()
            relative = path.relative_to(source)
            if stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                raise UserError(f"neither a file nor a folder: {relative}")
            yield Entry(str(relative), found.st_size)
            if stat.S_ISDIR(found.st_mode) and len(relative.parts) <= _DEEPEST:
                folders.append(path)


def _unpack_zip(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as archive:
        entries: list[Entry] = []
        for info in archive.infolist():
            is_link = stat.S_ISLNK(info.external_attr >> 16)
            entries.append(Entry(info.filename, info.file_size, is_link))
        _check(entries)
        kept = [name for name in archive.namelist() if not _is_left_out(name)]
        archive.extractall(target, kept)  # of each file at most what its entry says


class _Limited:
    """A tar as tarfile reads it, decompressed, up to a number of bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        """Return the next bytes; UserError where tarfile takes a header's size for true."""
        if not 0 <= size <= _LONGEST_HEADER:
            raise UserError(f"a header of {size:,} bytes: at most {_LONGEST_HEADER:,} are read")
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        """Go to a place; UserError for one behind all that is unpacked."""
        if position > 2 * MOST_BYTES:  # the files, and their headers
            raise UserError(f"more than {2 * MOST_BYTES:,} bytes: leave out data and checkpoints")
        return self._stream.seek(position)

    def tell(self) -> int:
        """Return the place."""
        return self._stream.tell()


def _decompressed(source: Path) -> BinaryIO:
    """Return the stream of a tar."""
    with source.open("rb") as file:
        begin = file.read(6)
    for magic, opener in _OPENERS.items():
        if begin.startswith(magic):
            return cast(BinaryIO, opener(source))
    return source.open("rb")


def _unpack_tar(source: Path, target: Path) -> None:
    with (
        _decompressed(source) as stream,
        tarfile.open(fileobj=cast(BinaryIO, _Limited(stream)), mode="r:") as archive,
    ):
        members = list(islice(archive, MOST_FILES + 1))  # there may be millions
        # Before Python 3.11.13 a chain of links leads past the filter (CVE-2025-4517).
        _check([Entry(info.name, info.size, info.issym() or info.islnk()) for info in members])
        strange = [info.name for info in members if not (info.isreg() or info.isdir())]
        if strange:
            raise UserError(f"neither a file nor a folder: {listed(strange, most=3)}")
        kept = [info for info in members if not _is_left_out(info.name)]
        archive.extractall(target, kept, filter="data")


def _is_left_out(name: str) -> bool:
    """Return whether an entry of an archive is none of the student's work."""
    return not set(IGNORED).isdisjoint(PurePosixPath(name).parts)


def _check(entries: Sequence[Entry]) -> None:
    """Raise UserError unless all this can be unpacked without harm."""
    names = [entry.name for entry in entries]
    parts = {name: PurePosixPath(name.replace("\\", "/")).parts for name in names}
    outside = [name for name in names if ".." in parts[name]]
    if outside:
        raise UserError(f"outside of its folder: {listed(outside, most=3)}")
    links = [entry.name for entry in entries if entry.is_link]
    if links:
        raise UserError(f"links in an archive are not followed: {listed(links, most=3)}")
    strange = [ascii(name) for name in names if name.encode(errors="ignore").decode() != name]
    if strange:
        raise UserError(f"names that are no UTF-8: {listed(strange, most=3)}: rename them")
    longest = max(names, key=lambda name: len(name.encode()), default="")
    if len(longest.encode()) > _LONGEST_NAME:
        raise UserError(
            f"a name of {len(longest.encode()):,} bytes, {longest[:40]}…: at most "
            f"{_LONGEST_NAME:,}, folders included"
        )
    deepest = max(names, key=lambda name: len(parts[name]), default="")
    if len(parts.get(deepest, ())) > _DEEPEST:
        raise UserError(f"{len(parts[deepest])} folders deep, {deepest[:40]}…: at most {_DEEPEST}")
    total = sum(abs(entry.size) for entry in entries)
    if len(entries) > MOST_FILES or total > MOST_BYTES:
        raise UserError(
            f"{len(entries):,} files of {total:,} bytes or more: at most {MOST_FILES:,} and "
            f"{MOST_BYTES:,} are unpacked. Leave out data and checkpoints"
        )
    if not entries:
        raise UserError("it is empty")


def _let_everybody_read(folder: Path) -> None:
    """Let others read all, run what its owner may run, and write nothing."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        if path.is_dir():
            path.chmod(0o755)
        else:
            path.chmod(path.stat().st_mode & 0o111 | 0o644)


def _refuse_links_outside(folder: Path) -> None:
    """Raise UserError if a link leads out of the folder."""
    inside = os.path.realpath(folder)
    for path in folder.rglob("*"):
        # Not Path.resolve, which raises for a loop of links.
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise UserError(f"{path.relative_to(folder)} is a link that leads elsewhere")


if __name__ == "__main__":
    sys.exit(main())
