"""What was handed in: folders, zips and tars, and the script of each part in them.

``unpack`` copies one to a folder of the grader's own: nothing above that folder is written, no link
in it leads out, and its size is limited. ``find_script`` finds a part's script in it.
"""

import csv
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from common.errors import UserError, count, file_errors, first_of, reason_of
from common.utils.atomic_files import read_regular
from lab.flags import refuse
from lab.grade.rubric import Part, Rubric

MOST_BYTES, MOST_FILES = 2**30, 20_000
_SUFFIXES = (".zip", ".tgz", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz")
_IGNORED = ("__MACOSX", "__pycache__", ".git", ".venv", "venv")


def named(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the submissions by their names, which are their files' without the ending.

    Several of one name are one mistake, see ``unpack``.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(_name(path), []).append(path)
    return found


def _name(path: Path) -> str:
    ending = next((one for one in _SUFFIXES if path.name.lower().endswith(one)), "")
    name = (
        path.name.removesuffix(path.name[len(path.name) - len(ending) :]) if ending else path.name
    )
    # Without dots around it: "..", of "...zip", is another folder.
    return (
        "".join(one if one.isalnum() or one in "-_.@" else "_" for one in name).strip(".")
        or "submission"
    )


def unpack(sources: Sequence[Path], target: Path) -> None:
    """Copy a submission to a new folder that everybody can read.

    Raises UserError, in one line, for what is no submission or not harmless.
    """
    source, *others = sources
    if others:
        raise UserError(f"{count(len(sources), 'submission')} have this name: rename them")
    try:
        if source.is_dir():
            files = {one.relative_to(source): one.lstat().st_size for one in source.rglob("*")}
            _check([one for one in files.items() if not set(_IGNORED) & set(one[0].parts)])
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_IGNORED))
        else:
            _unpack_archive(source, target)
        target.chmod(0o755)
        for path in target.rglob("*"):
            # Not Path.resolve, which raises for a loop of links.
            end = Path(os.path.realpath(path))
            if path.is_symlink() and not end.is_relative_to(os.path.realpath(target)):
                raise UserError(f"{path.relative_to(target)} is a link that leads elsewhere")
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else path.stat().st_mode & 0o111 | 0o644)
    except UserError:
        raise
    # What damaged archives make of the libraries: zlib.error, LZMAError, KeyError, OverflowError.
    except Exception as error:
        raise UserError(f"it cannot be unpacked ({reason_of(error).rstrip(':')})") from error
    if not any(target.rglob("*.py")):
        raise UserError("it has no Python file")


def _unpack_archive(source: Path, target: Path) -> None:
    """Unpack a zip or a tar. Raises what those libraries raise, and UserError."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            _check(
                [(Path(one.filename), one.file_size) for one in entries],
                [one.filename for one in entries if stat.S_ISLNK(one.external_attr >> 16)],
            )
            archive.extractall(target)
    else:
        with tarfile.open(source) as tar:
            members = list(islice(tar, MOST_FILES + 1))  # there may be millions
            # Before Python 3.11.13 a chain of links leads past the filter (CVE-2025-4517).
            _check(
                [(Path(one.name), one.size) for one in members],
                [one.name for one in members if one.issym() or one.islnk()],
            )
            tar.extractall(target, members, filter="data")


def _check(sizes: Sequence[tuple[Path, int]], links: Sequence[str] = ()) -> None:
    """Raise UserError unless this can be unpacked: files and their sizes in bytes."""
    names, total = [str(path) for path, _ in sizes], sum(size for _, size in sizes)
    outside = [name for name in names if ".." in PurePosixPath(name.replace("\\", "/")).parts]
    strange = [ascii(name) for name in names if name.encode(errors="ignore").decode() != name]
    refuse(
        {
            f"outside of its folder: {first_of(outside, 3)}": bool(outside),
            f"links in an archive are not followed: {first_of(links, 3)}": bool(links),
            f"names that are no UTF-8: {first_of(strange, 3)}: rename them": bool(strange),
            f"{len(names):,} files of {total:,} bytes or more: at most {MOST_FILES:,} and "
            f"{MOST_BYTES:,} are unpacked. Leave out data and checkpoints": (
                len(names) > MOST_FILES or total > MOST_BYTES
            ),
            "it is empty": not names,
        }
    )


def find_script(folder: Path, part: Part, given: str | None) -> Path | str:
    """Return a part's script in a submission's folder, or why there is none.

    given : its place, by --map.
    """
    for pattern in [given] if given else part.files:
        paths = [one for one in sorted(folder.glob(pattern)) if one.is_file()]
        found = [one for one in paths if not set(_IGNORED) & set(one.relative_to(folder).parts)]
        if len(found) == 1:
            return found[0]
        if found:
            names = first_of([one.relative_to(folder) for one in found], 4)
            return f"several files fit {pattern}: {names}. Name one with --map"
    here = first_of([one.relative_to(folder) for one in sorted(folder.rglob("*.py"))], 6)
    return f"no file fits {given or ', '.join(part.files)}; here are {here}. Name one with --map"


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file that a person wrote, without spaces around.

    Raises UserError if it cannot be read or lacks a column.
    """
    with file_errors(f"{path} cannot be read"):
        text = read_regular(path, most_bytes=2**24).decode("utf-8-sig")
        rows = list(csv.DictReader(text.splitlines(), restval=""))
    if wrong := [one for one in columns if rows and one not in rows[0]]:
        raise UserError(f"{path}: the column {wrong[0]} is missing: it needs {', '.join(columns)}")
    return [{one: (row[one] or "").strip() for one in columns} for row in rows]


def check_row(
    row: Mapping[str, str], names: Mapping[str, object], rubric: Rubric, *, where: str
) -> None:
    """Raise UserError if a row names a submission or a part that is not there."""
    for column, known in (("submission", names), ("part", rubric.parts)):
        if row[column] not in known:
            raise UserError(
                f"{where}: there is no {column} {row[column]!r}: here are {first_of(list(known))}"
            )


def digest(folder: Path) -> str:
    """Return what tells whether anything in a folder has changed."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            whole.update(f"{path.relative_to(folder)}\0".encode(errors="surrogateescape"))
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()
