"""Read JSON into typed values. Whatever the bytes are, the only error is one UserError.

A schema is a dataclass or ``msgspec.Struct`` whose fields name their ranges with the types below.
A file that a measurement wrote names its kind under "what" and its version under "format".
Imports no torch.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.atomic_files import read_regular

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**53)]
Rank = Annotated[int, Meta(ge=0, lt=65_536)]
Ranks = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Text = Annotated[str, Meta(max_length=10_000)]

MOST_BYTES = 64 * 2**20
_PLACE = re.compile(r"^(.*?)(?: - at `\$(.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_MOST_SHOWN = 60


def decode(content: bytes, schema: type[T], *, name: str) -> T:
    """Return ``content`` as a ``schema``; unknown entries are ignored.

    Raises UserError that says: ``name``, the place, the value there, and what is allowed.
    """
    try:
        return msgspec.json.decode(content, type=schema)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}{_explain(str(error), content)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{name} is cut off or not JSON ({error})") from error


def encode(value: Any) -> bytes:
    """Return plain values, dataclasses and Structs as JSON; NaN and infinity become null."""
    return msgspec.json.encode(value)


def read_json(
    path: Path, schema: type[T], *, name: str | None = None, most_bytes: int = MOST_BYTES
) -> T:
    """Return a file as a ``schema``.

    name : of the file in messages; None: its path. Raises FileNotFoundError, and UserError if the
    file is no regular file, larger than ``most_bytes``, or does not fit the schema.
    """
    return decode(read_regular(path, most_bytes=most_bytes), schema, name=name or str(path))


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
        content = read_regular(path)
    except FileNotFoundError as error:
        raise UserError(missing) from error
    found = decode(content, dict[str, Any], name=name)
    if found.get("what") != label(kind, version)["what"]:
        raise UserError(f"{path} is not a {kind} of this project")
    if found.get("format") not in range(1, version + 1):
        raise UserError(
            f"{name} has format {shown(found.get('format'))}, this version reads "
            f"{'1' if version == 1 else f'1 to {version}'}"
        )
    return decode(content, schema, name=name)


def shown(value: Any) -> str:
    """Return a value as text for a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 2] + " …"


def _explain(error: str, content: bytes) -> str:
    """Return msgspec's message with the place as a user reads it, and the value found there."""
    found = _PLACE.match(error)
    assert found is not None  # matches every text
    place = (found[2] or "").lstrip(".")
    expected = re.sub(r"`", "", found[1][0].lower() + found[1][1:])
    where = f": {place}" if place else ""
    try:
        value: Any = json.loads(content)
        for name, index in _STEP.findall(found[2] or ""):
            value = value[int(index) if index else name]
    # RecursionError, ValueError: wrong further on, too. The others: msgspec does not name keys.
    except (RecursionError, ValueError, KeyError, IndexError, TypeError):
        return f"{where}: {expected}"
    if expected.startswith("expected"):
        return f"{where}: {expected.partition(', got ')[0]}, got {shown(value)}"
    return f"{where}: {expected}"
