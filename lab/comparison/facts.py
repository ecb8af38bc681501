"""Facts about machines and settings of runs, mostly only shown, from files and nodes of others."""

import re
from typing import Any

from common.errors import UserError
from common.utils.typed_json import CALM, MOST_NUMBER, MOST_TEXT, shown

# Not a union of texts, lists and objects: msgspec 0.22 crashes where a text with a pattern is in
# one. So ``check_facts`` checks them.
Facts = dict[str, Any]


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
        return len(value) <= MOST_TEXT and re.match(CALM, value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= MOST_NUMBER)
