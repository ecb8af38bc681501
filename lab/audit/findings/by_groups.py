"""What gradients tell of an exchange in groups of ranks, as inside nodes and then between them.

Each function gets how often every rank's gradient counts in what the optimisers get, or by what the
sum of all is divided, and finds which part of such an exchange is missing or done twice. All
return nothing where the numbers are no such mistake.
"""

from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from lab.audit.findings.gradient_fit import Update
from lab.audit.recording import Numbers

_SAME = 1e-2  # weights whose difference is below this part of the greatest are the same

Groups = Collection[frozenset[int]]


class Inside(NamedTuple):
    """An exchange inside groups of ranks alone.

    groups : the ranks of each.
    times : by rank, the multiple of its group's mean that it gets.
    """

    groups: list[list[int]]
    times: Numbers


def inside_groups(update: Update) -> Inside | None:
    """Return the groups inside which alone the ranks' gradients are added up.

    They share the ranks out: each rank gets the sum over its own group, in which all count alike.
    """
    weights = update.weights
    if weights is None or np.isnan(weights).any():
        return None
    counts = weights > _SAME * weights.max()
    groups = sorted({tuple(np.flatnonzero(row).tolist()) for row in counts})
    members = sorted(rank for group in groups for rank in group)
    shares_out = members == list(range(update.size)) and counts.diagonal().all()
    expected = counts * weights.diagonal()[:, None]
    if not shares_out or len(groups) == update.size:
        return None
    if np.abs(weights - expected).max() > _SAME * weights.max():
        return None
    return Inside([list(group) for group in groups], weights.sum(axis=1))


def group_of_the_mean(update: Update, groups: Groups) -> frozenset[int] | None:
    """Return the group whose ranks get the mean, or a multiple of it, while no other rank does."""
    ranks = [rank for rank, gradient in enumerate(update.gradients) if gradient == "the mean"]
    having = frozenset(ranks)
    return having if having in groups else None


def uneven_groups(update: Update, groups: Groups) -> dict[int, list[int]]:
    """Return by size of a group the ranks in such groups, if the mean of their means is taken.

    In it each group counts alike, so a rank of a group of n counts 1/n times as often.
    """
    if update.weights is None:
        return {}
    shares = update.weights.mean(axis=0)
    sizes = {len(group) for group in groups} | {1}
    for number in range(2, update.size):  # of groups
        exact = shares.sum() / (number * shares)
        found: dict[int, list[int]] = {}
        for rank, size in enumerate(exact.round().astype(int).tolist()):
            found.setdefault(size, []).append(rank)
        whole = np.abs(exact - exact.round()).max() < _SAME
        filled = all(len(ranks) % size == 0 for size, ranks in found.items() if size)
        if whole and filled and len(found) > 1 and sizes.issuperset(found):
            return found
    return {}


def group_sizes(divisor: float, groups: Groups, tolerance: float) -> Sequence[int]:
    """Return the size of a group by which a sum is divided, or two sizes whose product it is."""
    sizes = sorted({len(group) for group in groups} - {1})
    pairs = combinations_with_replacement(sizes, 2)
    for chosen in [*((size,) for size in sizes), *pairs]:
        if abs(divisor / np.prod(chosen) - 1) < tolerance:
            return chosen
    return ()
