"""Read JSON into typed values. Whatever the bytes are, the only error is one UserError.

A schema is a dataclass, ``msgspec.Struct`` or TypedDict whose fields name their ranges with the
types below. Entries that a schema does not know are left out. A file that a measurement wrote names
its kind under "what" and its version under "format". Imports no torch.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.atomic_files import read_regular, write_atomically

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**53)]
Step = Annotated[int, Meta(ge=1, le=2**40)]
Rank = Annotated[int, Meta(ge=0, lt=65_536)]
Ranks = Annotated[int, Meta(ge=1, le=65_536)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[float, Meta(ge=0, le=2**60)]
_MOST_NUMBER = 1e39  # a 32-bit float holds a little less
Finite = Annotated[float, Meta(ge=-_MOST_NUMBER, le=_MOST_NUMBER)]
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # a terminal obeys them; tab and newline are harmless
_CALM = rf"^[^{_CONTROL}]*\Z"
_MOST_TEXT = 100_000
Text = Annotated[str, Meta(max_length=_MOST_TEXT, pattern=_CALM)]
Name = Annotated[str, Meta(pattern=r"^\w[\w.-]{0,99}\Z")]  # safe as a part of a path, or in HTML
LocalTime = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\Z")]
Facts = dict[str, Any]
"""Settings or facts that are mostly only shown; ``check_facts`` checks them.

Not a union of texts, lists and objects: msgspec 0.22 crashes where a text with a pattern is in one.
"""

MOST_BYTES = 32 * 2**20
_MOST_SHOWN = 60
_MOST_TRIED = 200  # entries, to find the one that is wrong
_NO_CONTROL = "without control characters"
_MESSAGE = re.compile(r"^(.*?)(?: - at (`key` in )?`\$(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_ENTRY = re.compile(r"(\.([^.\[\]]+)|\[(\d+|\.\.\.)\])")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def decode(content: bytes, schema: type[T], *, name: str) -> T:
    """Return ``content`` as a ``schema``.

    Raises UserError that says: ``name``, the place, the value there, and what is allowed.
    """
    try:
        return msgspec.json.decode(content, type=schema)
    except msgspec.ValidationError as error:
        raise UserError(name + _explain(str(error), content, schema)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{name} is cut off or not JSON ({error})") from error


def convert(value: Any, schema: type[T], *, name: str) -> T:
    """Return plain values as a ``schema``. Raises UserError as ``decode`` does."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise UserError(name + _explain(str(error), encode(value), schema)) from error


def check_facts(facts: Facts, *, name: str) -> None:
    """Raise UserError unless each fact is a plain value, or a list or an object of plain values."""
    for key, fact in facts.items():
        inner = [*fact, *fact.values()] if isinstance(fact, dict) else fact
        if not all(map(_is_plain, [key, *(inner if isinstance(inner, list) else [inner])])):
            raise UserError(
                f"{name}[{shown(key)}]: got {shown(fact)}, expected text without control "
                "characters, a number, true, false, null, or a list or an object of these"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MOST_TEXT and re.match(_CALM, value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= _MOST_NUMBER)


def encode(value: Any, *, indent: int = -1) -> bytes:
    """Return plain values, dataclasses and Structs as JSON; NaN and infinity become null.

    indent : spaces for each level; -1: on one line.
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=indent)


def read_json(
    path: Path, schema: type[T], *, name: str | None = None, most_bytes: int = MOST_BYTES
) -> T:
    """Return a file as a ``schema``.

    name : of the file in messages; None: its path. Raises FileNotFoundError, and UserError if the
    file is no regular file, larger than ``most_bytes``, or does not fit the schema.
    """
    return decode(read_regular(path, most_bytes=most_bytes), schema, name=name or str(path))


def read_lines(path: Path, schema: type[T], *, most_bytes: int = 8 * MOST_BYTES) -> list[T]:
    """Return each whole line of a file as a ``schema``; errors as those of ``read_json``.

    A last line without its end is left out: whoever writes the file has not finished it.
    """
    lines = read_regular(path, most_bytes=most_bytes).rpartition(b"\n")[0].splitlines()
    return [
        decode(line, schema, name=f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
    ]


def write_json(path: Path, value: Any, schema: Any) -> None:
    """Write plain values that fit ``schema``, whole or not at all.

    Raises UserError, and leaves the file as it is, if they do not fit: nobody could read them.
    """
    convert(value, schema, name=f"{path} cannot be written")
    write_atomically(path, encode(value, indent=1) + b"\n")


class _Label(msgspec.Struct):
    what: Any = None
    format: Any = None


def label(kind: str, version: int) -> dict[str, Any]:
    """Return the entries by which ``read_versioned`` recognises a file."""
    return {"format": version, "what": f"{kind} of data-parallel-lab"}


def read_versioned(path: Path, schema: type[T], *, kind: str, version: int, missing: str) -> T:
    """Return a file's entries, without those of ``label``, as a ``schema``.

    kind : as given to ``label``; messages call the file by its last word. missing : the message if
    there is no file. Raises UserError if the file is missing, of another kind, of a newer version,
    or does not fit the schema.
    """
    name = f"the {kind.split()[-1]} {path}"
    try:
        content = read_regular(path, most_bytes=MOST_BYTES)
    except FileNotFoundError as error:
        raise UserError(missing) from error
    found = decode(content, _Label, name=name)
    if found.what != label(kind, version)["what"]:
        raise UserError(f"{path} is not a {kind} of this project")
    check_version(found.format, version, name=name)
    return decode(content, schema, name=name)


def check_version(found: Any, newest: int, *, name: str) -> None:
    """Raise UserError unless ``found`` is a version of the file from 1 to ``newest``."""
    if type(found) is not int or not 1 <= found <= newest:
        readable = "1" if newest == 1 else f"1 to {newest}"
        raise UserError(
            f"{name} has format {shown(found)}, this version reads {readable}: use the version "
            "that wrote it"
        )


def calm(text: str) -> str:
    """Return ``text`` as a ``Text`` that any terminal shows and none obeys, and cut if too long.

    Control characters, and others that are not printable, become spaces.
    """
    return "".join(one if one.isprintable() or one in "\t\n" else " " for one in text[:_MOST_TEXT])


def shown(value: Any) -> str:
    """Return a value as text for a message, at most 60 characters long."""
    text = repr(value[:_MOST_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 2] + " …"


def _explain(error: str, content: bytes, schema: Any) -> str:
    """Return msgspec's message with the place as a user reads it, and the value found there."""
    match = _MESSAGE.match(error)
    assert match is not None  # matches every text
    rule, of_key, place = match[1], match[2], match[3] or ""
    got = ""
    with contextlib.suppress(RecursionError, ValueError):  # in entries that the schema leaves out
        place, value = _look_up(json.loads(content), place, error, schema)
        got = f"got {shown(value)}, " if value is not msgspec.UNSET and not of_key else ""
    where = place.lstrip(".")
    if missing := _MISSING.match(rule):
        return f": {where}{'.' * bool(where)}{missing[1]} is missing"
    where = f": a name in {where}" if of_key else f": {where}" * bool(where)
    if rule.startswith(("Invalid number", "Number out of range")):
        return f"{where}: {got}expected a number that 64 bits can hold"
    if not rule.startswith("Expected"):  # the schema's own rule says what it found
        return f"{where}: {rule}"
    expected = rule.partition(", got ")[0].replace(f"matching regex {_CALM!r}", _NO_CONTROL)
    return f"{where}: {got}e{re.sub('`(.*?)`', _in_words, expected[1:])}"


def _in_words(types: re.Match[str]) -> str:
    """Return "a number or null" for `float | null`."""
    return " or ".join(_WORDS[name] for name in types[1].split(" | "))


def _look_up(root: Any, place: str, error: str, schema: Any) -> tuple[str, Any]:
    """Return ``place`` with the names that msgspec writes as ``[...]``, and the value there.

    The value is UNSET if a name cannot be found. Empties dicts in ``root``.
    """
    where, value = "", root
    for text, name, index in _ENTRY.findall(place):
        if index != "...":
            where, value = where + text, value[int(index) if index else name]
            continue
        wrong = _wrong_entry(value, root, error, schema)
        if wrong is None:
            return place, msgspec.UNSET
        where, value = f"{where}[{shown(wrong)}]", value[wrong]
    return where, value


def _wrong_entry(entries: dict[str, Any], root: Any, error: str, schema: Any) -> str | None:
    """Return the first name without whose entry the error would not be; leaves only that entry."""
    every = dict(entries)
    for name in list(every)[:_MOST_TRIED]:
        entries.clear()
        entries[name] = every[name]
        try:
            msgspec.convert(root, schema)
        except msgspec.ValidationError as found:
            if str(found) == error:
                return name
    entries.update(every)
    return None
