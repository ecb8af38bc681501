"""Look up a variant (model, strategy, dataset) in a plain dict of ``name -> "module:attribute"``.

The dicts hold strings, so that ``--help`` can list every choice without importing torch.
``choices_text`` and ``closest`` suggest a name for a misspelt one.
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from common.errors import UserError

_ALIKE = 0.6  # of at most 1, as in difflib.get_close_matches


def load(table: Mapping[str, str], name: str, *, kind: str) -> Any:
    """Import and return ``table[name]``; UserError with the choices if the name is unknown."""
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}: {choices_text(name, table)}")
    module, attribute = table[name].split(":")
    try:
        return getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module:
            raise  # the module exists, and imports something that does not
        raise UserError(
            f"{kind} {name!r} is listed as {table[name]}, but {error}: correct the line"
        ) from error


def choices_text(got: str, names: Iterable[str]) -> str:
    """Return what to say about a wrong name: the name most like it, if any, and all names."""
    names = list(names)
    close, listed = closest(got, names), ", ".join(names)
    return f"did you mean {close}? Choices: {listed}" if close else f"choose one of {listed}"


def closest(got: str, names: Iterable[str]) -> str | None:
    """Return the name that begins with ``got`` or is most like it, or None.

    Case, dashes and underscores do not count.
    """

    def likeness(name: str) -> float:
        plain = _plain(name)
        begins = bool(wanted) and plain.startswith(wanted)
        return 1.0 if begins else difflib.SequenceMatcher(None, wanted, plain).ratio()

    wanted = _plain(got)
    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _ALIKE else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
