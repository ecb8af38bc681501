"""Look up a variant (model, strategy, dataset) in a plain dict of ``name -> "module:attribute"``.

The dicts hold strings, so that ``--help`` can list every choice without importing torch.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from common.errors import UserError


def load(table: Mapping[str, str], name: str, *, kind: str) -> Any:
    """Import and return ``table[name]``; UserError with the choices if the name is unknown."""
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}: choose one of {', '.join(table)}")
    module, attribute = table[name].split(":")
    return getattr(import_module(module), attribute)
