"""Look up a variant (model, strategy, dataset) in a plain dict of ``name -> "module:attribute"``.

The dicts hold strings, so that ``--help`` can list every choice without importing torch.
``choices_text`` and ``closest`` suggest a name for a misspelt one.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from common.errors import UserError

T = TypeVar("T")


def find(table: Mapping[str, T], name: str, *, kind: str) -> T:
    """Return ``table[name]``; UserError with the choices if the name is unknown."""
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}: {choices_text(name, table)}")
    return table[name]


def choices_text(got: str, names: Iterable[str]) -> str:
    """Return what to say about a wrong name: the name most like it, if any, and all names."""
    names = list(names)
    listed = ", ".join(names)
    close = closest(got, names)
    return (
        f"choose one of {listed}" if close is None else f"did you mean {close}? Choices: {listed}"
    )


def closest(got: str, names: Iterable[str]) -> str | None:
    """Return the name that begins with ``got`` or is most like it, or None.

    Case, dashes and underscores do not count.
    """
    wanted = _plain(got)
    plain = {_plain(name): name for name in names}
    if wanted:
        for name in plain:
            if name.startswith(wanted):
                return plain[name]
    similar = difflib.get_close_matches(wanted, plain, n=1)
    return plain[similar[0]] if similar else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
