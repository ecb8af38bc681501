"""Look up a variant (model, strategy, dataset) in a plain dict of ``name -> "module:attribute"``.

The dicts hold strings, so that ``--help`` can list every choice without importing torch.
``choices_text`` and ``closest`` suggest a name for a misspelt one.
"""

import difflib
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any

from common.errors import UserError


def load(table: Mapping[str, str], name: str, *, kind: str) -> Any:
    """Import and return ``table[name]``; UserError with the choices if the name is unknown."""
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}: {choices_text(name, table)}")
    return resolve_name(table[name])


def choices_text(got: str, names: Iterable[str]) -> str:
    """Return what to say about a wrong name: the name most like it, if any, and all names."""
    names = list(names)
    close, listed = closest(got, names), ", ".join(names)
    return f"did you mean {close}? Choices: {listed}" if close else f"choose one of {listed}"


def closest(got: str, names: Iterable[str]) -> str | None:
    """Return the name that begins with ``got`` or is most like it, or None.

    Case, dashes and underscores do not count.
    """

    wanted, plain = _plain(got), {_plain(name): name for name in names}
    begun = [name for name in plain if wanted and name.startswith(wanted)]
    likely = begun or difflib.get_close_matches(wanted, plain, n=1)
    return plain[likely[0]] if likely else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
