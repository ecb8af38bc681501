"""Read the JSON files that a measurement wrote, and refuse those of another kind or version.

Such a file names its kind under "what" and its version under "format". Imports no torch.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError

_Parsed = TypeVar("_Parsed")


def label(kind: str, version: int) -> dict[str, Any]:
    """Return the entries by which ``read_versioned`` recognises a file."""
    return {"format": version, "what": f"{kind} of data-parallel-lab"}


def read_versioned(
    path: Path, parse: Callable[[dict[str, Any]], _Parsed], *, kind: str, version: int, missing: str
) -> _Parsed:
    """Return what ``parse`` makes of the file's entries, without those of ``label``.

    kind : as given to ``label``; messages call the file by its last word. missing : the message if
    there is no file. Raises UserError if the file is missing, cut, or of another kind or version,
    or if ``parse`` fails.
    """
    the_file, expected = f"the {kind.split()[-1]} {path}", label(kind, version)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(missing) from error
    except OSError as error:
        raise UserError(f"{the_file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or nested too deeply
        raise UserError(f"{the_file} is cut off or not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("what") != expected["what"]:
        raise UserError(f"{path} is not a {kind} of this project")
    if content.get("format") != version:
        raise UserError(
            f"{the_file} has format {content.get('format')!r}, this version reads {version}"
        )
    try:
        return parse({name: value for name, value in content.items() if name not in expected})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{the_file} is incomplete ({type(error).__name__}: {error})") from error


def non_negatives(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries; ValueError if one is not a finite number of 0 or more."""
    return {name: non_negative(value) for name, value in content.items()}


def non_negative(value: Any) -> float:
    """Return ``value``; ValueError if it is not a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} where a number of 0 or more belongs")
    return value
