"""The sentences that ``lab predict`` and the page of ``lab whatif`` share: sentences.toml."""

import tomllib
from functools import cache
from pathlib import Path

_TEMPLATES = Path(__file__).with_name("sentences.toml")


@cache
def templates() -> dict[str, str]:
    """Return the sentences by name, with {fields} to fill."""
    return tomllib.loads(_TEMPLATES.read_text(encoding="utf-8"))


def sentence(name: str, **fields: object) -> str:
    """Return a sentence with its fields filled; KeyError if one is missing."""
    return templates()[name].format(**fields)
