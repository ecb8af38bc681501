"""What was handed in: folders, zips and tars by their names, and the script of each part in them.

``unpack`` (unpack.py) copies one to a folder of the grader's own; ``find_scripts`` finds the parts'
scripts in it.
"""

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from common.errors import UserError, file_errors
from common.say import listed
from common.utils.atomic_files import read_regular
from common.utils.grouping import grouped
from lab.grade.facts import Look
from lab.grade.rubric import Part, Ranks, Rubric

_SUFFIXES = (".zip", ".tgz", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz")
_TRAINS = re.compile(r"\.backward\(|init_process_group|DistributedDataParallel")

# What Gradescope puts beside the folders of an export; exported.py reads it.
EXPORT = "submission_metadata.yml"
EVERY = "*"  # in a table: all submissions, or all parts
# The names of a submission and of a part.
Place = tuple[str, str]


def named(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the submissions by their names, which are their files' without the ending.

    Several of one name are one mistake. The file that ``export/*`` names as well is none.
    """
    return grouped((_name(path), path) for path in paths if path.name != EXPORT)


def _name(path: Path) -> str:
    """Return a name that is safe as a folder's: letters, digits, and - _ . @ inside."""
    name = path.name
    for suffix in _SUFFIXES:
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    # Without dots around it: "..", of "...zip", is another folder.
    return re.sub(r"[^\w.@-]", "_", name).strip(".") or "submission"


# --- scripts ---


def find_scripts(folder: Path, rubric: Rubric, given: Mapping[str, str]) -> dict[str, Path | Look]:
    """Return the script of each part in a submission's folder, or why there is none.

    A part is missing only if every file that trains is the script of another part, or is imported.

    given : places by --map, by part.
    """
    found = {name: _find_script(folder, name, rubric, given.get(name)) for name in rubric.parts}
    texts = {path: _text(path) for path in _fitting(folder, "**/*.py")}
    may_be_a_part = any(
        path not in found.values() and _TRAINS.search(text) and not _is_imported(path, texts)
        for path, text in texts.items()
    )
    for name, script in found.items():
        if isinstance(script, Look) and may_be_a_part:
            found[name] = msgspec.structs.replace(script, missing=False)
    return found


def _is_imported(path: Path, texts: Mapping[Path, str]) -> bool:
    return any(file != path and _imports(text, path.stem) for file, text in texts.items())


def _find_script(folder: Path, name: str, rubric: Rubric, given: str | None) -> Path | Look:
    """Return a part's script, or why there is none.

    One that no pattern of the rubric fits is found by the part's name, or by what the part uses.

    given : its place, by --map.
    """
    part = rubric.parts[name]
    patterns = [given] if given else part.files
    for pattern in patterns:
        if found := _fitting(folder, pattern):
            return _one_of(folder, found)
    if not given:
        others = _scripts_of_others(folder, name, rubric)
        left = [path for path in _fitting(folder, "**/*.py") if path not in others]
        for is_alike in _likenesses(name, part):
            alike = [path for path in left if is_alike.search(str(path.relative_to(folder)))]
            if alike:
                return _one_of(folder, alike)
    here = _listed(folder, _fitting(folder, "**/*.py"))
    return Look(
        f"no file fits {', '.join(patterns)}; here are {here}.",
        student="Name the script as the assignment says.",
        grader="Name it with --map.",
        missing=not given,
    )


def _fitting(folder: Path, pattern: str) -> list[Path]:
    """Return the student's files that fit a pattern."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file()]


def _listed(folder: Path, paths: Sequence[Path]) -> str:
    return listed([path.relative_to(folder) for path in paths], most=6)


def _scripts_of_others(folder: Path, name: str, rubric: Rubric) -> set[Path]:
    """Return the files that fit the patterns of other parts."""
    scripts: set[Path] = set()
    for other, part in rubric.parts.items():
        if other != name:
            for pattern in part.files:
                scripts.update(_fitting(folder, pattern))
    return scripts


def _likenesses(name: str, part: Part) -> Iterator[re.Pattern[str]]:
    """Yield patterns of paths that are like a part's, the surest first.

    part2a is also Part_2-A, task2a or a bare 2a, and one that uses gather may be main_gather.py.
    """
    number = re.search(r"(?<!\d)(\d+)([a-z]?)$", name.lower())
    if number is None:
        spelled = [r"[\W_]*".join(re.findall("[a-z0-9]+", name.lower()))]
    else:
        digits, letter = number.groups()
        word = r"(?:part|task|question|exercise|step|section|q|p)[\W_]*"
        spelled = [rf"{word}{digits}[\W_]*{letter}" if letter else f"{word}{digits}"]
        if letter:
            spelled.append(f"[a-z_]*{digits}{letter}")
    spelled += ["[a-z0-9_]*" + r"[\W_]*".join(way.split("_")) + "[a-z0-9_]*" for way in part.uses]
    for text in spelled:
        yield re.compile(rf"(?<![a-z0-9]){text}(?![a-z0-9])", re.IGNORECASE)


def _one_of(folder: Path, found: Sequence[Path]) -> Path | Look:
    """Return the one file that others do not import and that trains, or why it cannot be told."""
    texts = {path: _text(path) for path in found}
    imported = {path for path in found if any(_imports(text, path.stem) for text in texts.values())}
    left = [path for path in found if path not in imported] or list(found)
    if len(left) > 1:
        left = [path for path in left if _TRAINS.search(texts[path])] or left
    if len(left) == 1:
        return left[0]
    return Look(
        f"several files may be the script: {_listed(folder, left)}.",
        student="Hand in one script for this part, named as the assignment says.",
        grader="Name one with --map.",
    )


def _text(path: Path) -> str:
    return read_regular(path, last_bytes=2**20).decode(errors="replace")


def _imports(text: str, module: str) -> bool:
    """Return whether a script imports a module."""
    pattern = rf"^[ \t]*(?:from|import)[ \t]+(?:\w+\.)*\.?{re.escape(module)}\b"
    return re.search(pattern, text, re.MULTILINE) is not None


# --- tables that a person wrote ---


class CsvRow(msgspec.Struct):
    """A row about a part of a submission; derived classes add columns."""

    submission: str
    part: str

    @property
    def is_general(self) -> bool:
        """Whether it is about all submissions, or all parts."""
        return EVERY in (self.submission, self.part)


class ScriptRow(CsvRow):
    """A row of the file of --map: where a script lies in its submission, and how it is started.

    Each may be empty: then the rubric says it. ranks : numbers with spaces between.
    """

    path: str
    command: str = ""
    ranks: str = ""

    @property
    def numbers(self) -> list[int]:
        """The numbers of ranks. Raises ValueError for what is none."""
        return msgspec.convert(self.ranks.split(), list[Ranks], strict=False)


R = TypeVar("R", bound=CsvRow)


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """Return the rows of a CSV file that a person wrote, without spaces around; general ones first.

    kind : its fields are the columns; those with a default may be missing.

    Raises UserError if the file cannot be read or lacks a column.
    """
    columns = kind.__struct_fields__
    needed = columns[: len(columns) - len(kind.__struct_defaults__)]
    with file_errors(f"{path} cannot be read"):
        text = read_regular(path, most_bytes=2**24).decode("utf-8-sig")
        rows = list(csv.DictReader(text.splitlines(), restval=""))
    if rows:
        for column in needed:
            if column not in rows[0]:
                raise UserError(
                    f"{path}: the column {column} is missing: it needs {', '.join(needed)}"
                )
    read = [kind(*((row.get(column) or "").strip() for column in columns)) for row in rows]
    return sorted(read, key=lambda row: not row.is_general)


def places_of(
    row: CsvRow, names: Mapping[str, object], rubric: Rubric, *, where: str
) -> list[Place]:
    """Return the parts that a row is about. Raises UserError for a name that is not there."""
    submissions = _chosen(row.submission, names, where=f"{where}: there is no submission")
    parts = _chosen(row.part, rubric.parts, where=f"{where}: there is no part")
    return [(name, part) for name in submissions for part in parts]


def _chosen(name: str, known: Mapping[str, object], *, where: str) -> list[str]:
    if name == EVERY:
        return list(known)
    if name not in known:
        raise UserError(f"{where} {name!r}: here are {listed(known)}; {EVERY} means all")
    return [name]


def digest(folder: Path) -> str:
    """Return what tells whether anything in a folder has changed."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            whole.update(f"{path.relative_to(folder)}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:  # which may be as large as memory
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
