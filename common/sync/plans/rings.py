"""Plans of the strategies without a root: all_reduce after backward, rings and trees by hand."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from common.sync.message_cost import (
    COPIES_PER_PARAMETER,
    GradientSize,
    Operation,
    Sends,
    buffers,
    tree_children,
)
from common.sync.plans.base import ReplicatedPlan


class AllReducePlan(ReplicatedPlan):
    """An all_reduce for each parameter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [
            Operation("all_reduce", size, copied_bytes=COPIES_PER_PARAMETER * size)
            for size in sizes
        ]


class AllReduceFlatPlan(ReplicatedPlan):
    """An all_reduce for each flat buffer."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation("all_reduce", size, copied_bytes=size) for size in buffers(sizes)]


class RoundsPlan(ReplicatedPlan):
    """Base class of the plans with rounds of point-to-point messages, for each flat buffer."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """List the rounds that add up one flat buffer over two or more ranks."""
        raise NotImplementedError

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. As many rounds pass the sums on, in reverse order.

        The gradients are copied into the buffer before the first round.
        """
        if ranks == 1:
            return []
        found: list[Operation] = []
        for size in buffers(sizes):
            adding = self.rounds(size, ranks)
            first, *others = adding
            found.append(replace(first, count=1, copied_bytes=size))
            if first.count > 1:
                found.append(replace(first, count=first.count - 1))
            found += others
            found += [replace(operation, summed_bytes=0) for operation in reversed(adding)]
        return found


class TreePlan(RoundsPlan):
    """For each flat buffer one round up and one round down for each level of the tree."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class. With each level the partners are twice as far apart."""
        found = []
        for level in range((ranks - 1).bit_length()):
            partner = partial(_partner_in_tree, distance=1 << level, ranks=ranks)
            found.append(Operation("exchange", size, summed_bytes=size, partner=partner))
        return found

    def sends(self, sizes: Sequence[int], rank: int, ranks: int) -> list[Sends]:
        """See the base class: everything to the parent, and everything to each child."""
        relatives = [rank + (1 << level) for level in range(tree_children(rank, ranks))]
        if rank > 0:
            relatives.append(rank & (rank - 1))
        return [Sends(relatives, Fraction(sum(sizes)))]


class RingPlan(RoundsPlan):
    """For each flat buffer N-1 rounds that add chunks, and N-1 that pass the sums on."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class."""
        longest = -(-size.entries // ranks) * size.itemsize  # the division rounds up
        return [Operation("exchange", longest, count=ranks - 1, summed_bytes=longest)]

    def sends(self, sizes: Sequence[int], rank: int, ranks: int) -> list[Sends]:
        """See the base class: first all chunks but its own, then all but the next one."""
        sent = 0
        for size in buffers(sizes):
            shortest, longer_ones = divmod(size.entries, ranks)  # as tensor_split cuts the buffer
            for skipped in (rank, (rank + 1) % ranks):
                entries = shortest + 1 if skipped < longer_ones else shortest
                sent += (size.entries - entries) * size.itemsize
        return [Sends([(rank + 1) % ranks], Fraction(sent))]


class HalvingDoublingPlan(RoundsPlan):
    """For each flat buffer rounds that add halves, quarters and so on, then the same in reverse."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class. Ranks beyond a power of two cost one round of everything each way."""
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

    def sends(self, sizes: Sequence[int], rank: int, ranks: int) -> list[Sends]:
        """See the base class: the half given in each halving, the half kept in each doubling."""
        power = largest_power(ranks)
        if rank >= power:
            return [Sends([rank - power], Fraction(sum(sizes)))]
        found = []
        if rank + power < ranks:  # a surplus rank, which gets the sum
            found.append(Sends([rank + power], Fraction(sum(sizes))))
        for size in buffers(sizes):
            for partner, kept, given in halving_rounds(size.entries, rank, power):
                entries = (kept.stop - kept.start) + (given.stop - given.start)
                found.append(Sends([partner], Fraction(entries * size.itemsize)))
        return found


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
