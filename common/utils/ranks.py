"""Which ranks have which value. No torch here."""

from collections.abc import Mapping
from typing import Any


def ranks_by_value(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Return for each different value, as text, the ranks that have it; ``values`` is by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(str(value), []).append(rank)
    return ranks
