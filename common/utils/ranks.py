"""Which ranks have which value. No torch here."""

from collections.abc import Iterable
from typing import Any


def ranks_by_value(values: Iterable[Any]) -> dict[str, list[int]]:
    """Return for each different value, as text, the ranks that have it; ``values[rank]`` is a rank's."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ranks
