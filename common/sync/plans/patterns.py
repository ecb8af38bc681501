"""Rounds of point-to-point messages that add up a flat buffer: tree, ring, halving and doubling.

A plan names one of ``PATTERNS``; ``rounds_of`` lists its rounds along the slowest path, the
pattern's ``sends`` what one rank sends to which ranks. Imports no torch.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from common.sync.message_cost import GradientSize, Operation, Sends, tree_children


class Pattern(NamedTuple):
    """Who exchanges what with whom to add up one flat buffer.

    Parameters
    ----------
    adding : returns the rounds that add up a buffer over two or more ranks.
    sends : returns what a rank sends of a buffer: (buffer, rank, ranks).
    """

    adding: Callable[[GradientSize, int], list[Operation]]
    sends: Callable[[GradientSize, int, int], list[Sends]]


def rounds_of(pattern: str, size: GradientSize, ranks: int) -> list[Operation]:
    """List the rounds that leave the sum on every rank; none for one rank.

    The gradients are copied into the buffer before the first round. As many rounds as add up pass
    the sums on, in reverse order.
    """
    if ranks == 1:
        return []
    adding = PATTERNS[pattern].adding(size, ranks)
    first, *others = adding
    found = [replace(first, count=1, copied_bytes=size)]
    if first.count > 1:
        found.append(replace(first, count=first.count - 1))
    passing_on = [replace(operation, summed_bytes=0) for operation in reversed(adding)]
    return found + others + passing_on


def _tree(size: GradientSize, ranks: int) -> list[Operation]:
    """List a round for each level of the tree. With each the partners are twice as far apart."""
    found = []
    for level in range((ranks - 1).bit_length()):
        partner = partial(_partner_in_tree, distance=1 << level, ranks=ranks)
        found.append(Operation("exchange", size, summed_bytes=size, partner=partner))
    return found


def _tree_sends(size: GradientSize, rank: int, ranks: int) -> list[Sends]:
    """Send everything to the parent, and everything to each child."""
    relatives = [rank + (1 << level) for level in range(tree_children(rank, ranks))]
    if rank > 0:
        relatives.append(rank & (rank - 1))
    return [Sends(relatives, Fraction(size))]


def _ring(size: GradientSize, ranks: int) -> list[Operation]:
    """List N-1 rounds in which each rank passes a chunk to the next one."""
    longest = -(-size.entries // ranks) * size.itemsize  # the division rounds up
    return [Operation("exchange", longest, count=ranks - 1, summed_bytes=longest)]


def _ring_sends(size: GradientSize, rank: int, ranks: int) -> list[Sends]:
    """Send first all chunks but the rank's own, then all but the next one."""
    sent = 0
    shortest, longer_ones = divmod(size.entries, ranks)  # as tensor_split cuts the buffer
    for skipped in (rank, (rank + 1) % ranks):
        entries = shortest + 1 if skipped < longer_ones else shortest
        sent += (size.entries - entries) * size.itemsize
    return [Sends([(rank + 1) % ranks], Fraction(sent))]


def _halving(size: GradientSize, ranks: int) -> list[Operation]:
    """List rounds of halves, quarters and so on.

    Ranks beyond a power of two cost one round of everything.
    """
    power = largest_power(ranks)
    found = []
    if ranks > power:
        partner = partial(_partner_of_surplus, power=power, ranks=ranks)
        found.append(Operation("exchange", size, summed_bytes=size, partner=partner))
    for level in range(1, power.bit_length()):
        part = -(-size.entries >> level) * size.itemsize  # the halving rounds up
        partner = partial(_partner_in_halving, distance=power >> level, power=power)
        found.append(Operation("exchange", part, summed_bytes=part, partner=partner))
    return found


def _halving_sends(size: GradientSize, rank: int, ranks: int) -> list[Sends]:
    """Send the half given in each halving, the half kept in each doubling."""
    power = largest_power(ranks)
    if rank >= power:
        return [Sends([rank - power], Fraction(size))]
    found = []
    if rank + power < ranks:  # a surplus rank, which gets the sum
        found.append(Sends([rank + power], Fraction(size)))
    for partner, kept, given in halving_rounds(size.entries, rank, power):
        entries = (kept.stop - kept.start) + (given.stop - given.start)
        found.append(Sends([partner], Fraction(entries * size.itemsize)))
    return found


PATTERNS = {
    "tree": Pattern(_tree, _tree_sends),
    "ring": Pattern(_ring, _ring_sends),
    "halving_doubling": Pattern(_halving, _halving_sends),
}


def _partner_in_tree(rank: int, *, distance: int, ranks: int) -> int | None:
    """Return a rank's parent or child in the round of that distance; None if it has neither."""
    partner = rank ^ distance
    return partner if rank % distance == 0 and partner < ranks else None


def _partner_of_surplus(rank: int, *, power: int, ranks: int) -> int | None:
    """Return the rank below the power of two for one beyond it, and the reverse."""
    partner = rank ^ power
    return partner if partner < ranks else None


def _partner_in_halving(rank: int, *, distance: int, power: int) -> int | None:
    """Return the rank with which one below the power of two exchanges halves."""
    return rank ^ distance if rank < power else None


def largest_power(ranks: int) -> int:
    """Return the largest power of two up to ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


def halving_rounds(entries: int, rank: int, power: int) -> list[tuple[int, slice, slice]]:
    """Return each round's partner, the half that ``rank`` keeps and the half that it gives away."""
    rounds = []
    left = slice(0, entries)
    distance = power // 2
    while distance:
        middle = (left.start + left.stop) // 2
        low = slice(left.start, middle)
        high = slice(middle, left.stop)
        kept, given = (high, low) if rank & distance else (low, high)
        rounds.append((rank ^ distance, kept, given))
        left = kept
        distance //= 2
    return rounds
