"""Read JSON into typed values. Whatever the bytes are, the only error is one UserError.

A schema is a dataclass, ``msgspec.Struct`` or TypedDict whose fields name their ranges with the
types below. Entries that a schema does not know are left out. A file that a measurement wrote names
its kind under "what" and its version under "format". Imports no torch.
"""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from common.errors import UserError, file_errors
from common.utils.atomic_files import read_regular, whole_lines, write_atomically

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**53)]
Step = Annotated[int, Meta(ge=1, le=2**40)]
Rank = Annotated[int, Meta(ge=0, lt=65_536)]
Ranks = Annotated[int, Meta(ge=1, le=65_536)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[float, Meta(ge=0, le=2**60)]
MOST_NUMBER = 1e39  # a 32-bit float holds a little less
Finite = Annotated[float, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
# No control character that a terminal obeys; tab and newline are harmless.
CALM = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z"
MOST_TEXT = 100_000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # for colours
Text = Annotated[str, Meta(max_length=MOST_TEXT, pattern=CALM)]
Name = Annotated[str, Meta(pattern=r"^\w[\w.-]{0,99}\Z")]  # safe as a part of a path, or in HTML
LocalTime = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\Z")]
# Facts about a machine or a run, which are mostly only shown.
# Not a union of texts, lists and objects: msgspec 0.22 crashes where a text with a pattern is in
# one. So ``check_facts`` checks them.
Facts = dict[str, Any]
MOST_BYTES = 32 * 2**20
_MOST_SHOWN = 60


def decode(content: bytes, schema: type[T], *, name: str) -> T:
    """Return ``content`` as a ``schema``.

    Raises UserError that says: ``name``, the place in it, and what is allowed there.
    """
    try:
        return msgspec.json.decode(content, type=schema)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}: {_readable(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{name} is cut off or not JSON ({error})") from error


def convert(value: Any, schema: type[T], *, name: str) -> T:
    """Return plain values as a ``schema``. Raises UserError as ``decode`` does."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}: {_readable(error)}") from error


def encode(value: Any, *, indent: int = -1) -> bytes:
    """Return plain values, dataclasses and Structs as JSON; NaN and infinity become null.

    indent : spaces for each level; -1: on one line. Raises UserError if a text is not Unicode, as
    names of files may be.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=indent)
    except UnicodeEncodeError as error:
        raise UserError(
            f"{shown(error.object)} has bytes that are no text here, and JSON holds text alone: "
            "give a folder or file with another name, or set LC_ALL=C.UTF-8"
        ) from error


def read_json(path: Path, schema: type[T], *, most_bytes: int = MOST_BYTES) -> T:
    """Return a file as a ``schema``.

    Raises FileNotFoundError, and UserError if the file is no regular file, larger than
    ``most_bytes``, or does not fit the schema.
    """
    return decode(read_regular(path, most_bytes=most_bytes), schema, name=str(path))


def read_lines(path: Path, schema: type[T]) -> list[T]:
    """Return each of ``whole_lines`` as a ``schema``; errors as those of ``read_json``."""
    return [
        decode(line, schema, name=f"{path}, line {number}")
        for number, line in enumerate(whole_lines(path), start=1)
    ]


def write_json(path: Path, value: Any, schema: Any) -> None:
    """Write plain values that fit ``schema``, whole or not at all.

    Raises UserError, and leaves the file as it is, if they do not fit: nobody could read them.
    """
    convert(value, schema, name=f"{path} cannot be written")
    write_atomically(path, encode(value, indent=1) + b"\n")


def label(kind: str, version: int) -> dict[str, Any]:
    """Return the entries by which ``read_versioned`` recognises a file."""
    return {"format": version, "what": f"{kind} of data-parallel-lab"}


def read_versioned(path: Path, schema: type[T], *, kind: str, version: int) -> T:
    """Return a file's entries, without those of ``label``, as a ``schema``.

    kind : as given to ``label``; messages call the file by its last word. Raises UserError if the
    file is missing, of another kind, of a newer version, or does not fit the schema.
    """
    name = f"the {kind.split()[-1]} {path}"
    with file_errors(f"{name} cannot be read"):
        content = read_regular(path, most_bytes=MOST_BYTES)
    found = decode(content, dict[str, Any], name=name)
    if found.get("what") != label(kind, version)["what"]:
        raise UserError(f"{path} is not a {kind} of this project")
    check_version(found.get("format"), version, name=name)
    return decode(content, schema, name=name)


def check_version(found: Any, newest: int, *, name: str) -> None:
    """Raise UserError unless ``found`` is a version of the file from 1 to ``newest``."""
    if type(found) is not int or not 1 <= found <= newest:
        raise UserError(
            f"{name} has format {shown(found)}, this version reads {newest}: use the version "
            "that wrote it"
        )


def check_facts(facts: Facts, *, name: str) -> None:
    """Raise UserError unless each fact is a plain value, or a list or an object of plain values."""
    for key, fact in facts.items():
        if isinstance(fact, dict):
            values = [*fact, *fact.values()]
        elif isinstance(fact, list):
            values = fact
        else:
            values = [fact]
        if not all(map(_is_plain, [key, *values])):
            raise UserError(
                f"{name}[{shown(key)}]: got {shown(fact)}, expected text without control "
                "characters, a number, true, false, null, or a list or an object of these"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MOST_TEXT and re.match(CALM, value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= MOST_NUMBER)


def calm(text: str) -> str:
    """Return ``text`` as a ``Text`` that any terminal shows and none obeys, and cut if too long.

    Colours are left out. Control characters, and others that are not printable, become spaces.
    """
    plain = without_colours(text[:MOST_TEXT])
    return "".join(letter if letter.isprintable() or letter in "\t\n" else " " for letter in plain)


def without_colours(text: str) -> str:
    """Return a text without the codes with which terminals change colours."""
    return _COLOURS.sub("", text)


def shown(value: Any) -> str:
    """Return a value as text for a message, at most 60 characters long."""
    try:
        text = repr(value[:_MOST_SHOWN] if isinstance(value, str | list) else value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 2] + " …"


def _readable(error: msgspec.ValidationError) -> str:
    """Return msgspec's message with the place first: "steps[0].loss: Expected float"."""
    rule, _, place = str(error).replace("`", "").partition(" - at ")
    place = place.replace("$.", "").replace("$", "")
    rule = rule.replace(f"matching regex {CALM!r}", "without control characters")
    return f"{place}: {rule}" if place else rule
