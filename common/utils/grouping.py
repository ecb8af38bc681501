"""Group values by a key, such as the ranks by the value that they have, or by what fits."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def first_fit(items: Iterable[V], fits: Callable[[list[V], V], bool]) -> list[list[V]]:
    """Put each item into the first group that it fits, else into a new one."""
    groups: list[list[V]] = []
    for item in items:
        for group in groups:
            if fits(group, item):
                group.append(item)
                break
        else:
            groups.append([item])
    return groups
