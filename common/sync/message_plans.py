"""What a step of each strategy sends, as a list of messages.

Each strategy class derives from its plan here and adds the code that sends the messages. Nothing
here imports torch, so `lab predict` can build a plan alone and answer within a second. The plans
of the strategies that fill buckets are in bucket_plans.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from common.errors import UserError
from common.sync.message_cost import GradientSize, Operation, buffers, sent_bytes, tree_children

# Copies for each collective: into contiguous memory, for the division, and back.
COPIES_PER_PARAMETER = 3


class MessagePlan:
    """Base class of all plans. A plan defines ``operations``.

    A plan of point-to-point messages also defines ``bytes_sent``.
    """

    # Steps after which the messages repeat.
    period = 1

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """List what ``period`` steps send, in order, along the slowest path; for the cost model.

        ``sizes`` : bytes of each parameter's gradient, in the order of the parameters. Strategies
        that look at types and shapes need ``GradientSize.of(parameters)``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define operations()")

    def update_share(self, ranks: int) -> float:
        """Return the share of the parameters that each rank's optimiser updates."""
        return 1.0

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """Return the payload bytes that ``rank`` sends in ``period`` steps."""
        return sum(
            (
                one.count * sent_bytes(one.kind, one.nbytes, rank=rank, ranks=ranks)
                for one in self.operations(sizes, ranks)
            ),
            Fraction(0),
        )


class NoSyncPlan(MessagePlan):
    """No messages."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return []


class GatherScatterPlan(MessagePlan):
    """For each parameter a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return _through_root(sizes, ranks, copies=COPIES_PER_PARAMETER)


class GatherScatterFlatPlan(MessagePlan):
    """For each flat buffer a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return _through_root(buffers(sizes), ranks, copies=1)


def _through_root(sizes: Sequence[int], ranks: int, *, copies: int) -> list[Operation]:
    return [
        operation
        for size in sizes
        for operation in (
            Operation("gather", size, summed_bytes=(ranks - 1) * size, copied_bytes=copies * size),
            Operation("scatter", size),
        )
    ]


class ReduceBroadcastPlan(MessagePlan):
    """For each parameter a reduce and a broadcast."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation(kind, size) for size in sizes for kind in ("reduce", "broadcast")]


class AllReducePlan(MessagePlan):
    """An all_reduce for each parameter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [
            Operation("all_reduce", size, copied_bytes=COPIES_PER_PARAMETER * size)
            for size in sizes
        ]


class AllReduceFlatPlan(MessagePlan):
    """An all_reduce for each flat buffer."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation("all_reduce", size, copied_bytes=size) for size in buffers(sizes)]


class RoundsPlan(MessagePlan):
    """Base class of the plans with rounds of point-to-point messages, for each flat buffer."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """List the rounds that sum one flat buffer over two or more ranks."""
        raise NotImplementedError

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. The gradients are copied into the buffer before the first round."""
        found = []
        for size in buffers(sizes) if ranks > 1 else []:
            first, *others = self.rounds(size, ranks)
            repeats = [replace(first, count=first.count - 1)] if first.count > 1 else []
            found += [replace(first, count=1, copied_bytes=size), *repeats, *others]
        return found


class TreePlan(RoundsPlan):
    """For each flat buffer one round up and one round down for each level of the tree."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class."""
        up = Operation("exchange", size, count=(ranks - 1).bit_length(), summed_bytes=size)
        return [up, replace(up, summed_bytes=0)]

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: everything to the parent, and everything to each child."""
        return Fraction(sum(sizes) * ((rank > 0) + tree_children(rank, ranks)))


class RingPlan(RoundsPlan):
    """For each flat buffer N-1 rounds that add chunks, and N-1 that pass the sums on."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class."""
        longest = -(-size.entries // ranks) * size.itemsize  # the division rounds up
        adding = Operation("exchange", longest, count=ranks - 1, summed_bytes=longest)
        return [adding, replace(adding, summed_bytes=0)]

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: first all chunks but its own, then all but the next one."""
        return Fraction(
            sum(
                size.itemsize
                * (size.entries - _chunk_entries(size.entries, skipped % ranks, ranks))
                for size in buffers(sizes)
                for skipped in (rank, rank + 1)
            )
        )


def _chunk_entries(entries: int, index: int, ranks: int) -> int:
    return entries * (index + 1) // ranks - entries * index // ranks


class HalvingDoublingPlan(RoundsPlan):
    """For each flat buffer rounds that add halves, quarters and so on, then the same in reverse."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class. Ranks beyond a power of two cost one round of everything each way."""
        power = largest_power(ranks)
        parts = [size.entries] if ranks > power else []
        parts += [-(-size.entries >> level) for level in range(1, power.bit_length())]
        adding = [
            Operation("exchange", part * size.itemsize, summed_bytes=part * size.itemsize)
            for part in parts
        ]
        return adding + [replace(one, summed_bytes=0) for one in reversed(adding)]

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: the half given in each halving, the half kept in each doubling."""
        power = largest_power(ranks)
        if rank >= power:
            return Fraction(sum(sizes))
        for_the_surplus_rank = sum(sizes) if rank + power < ranks else 0
        in_rounds = sum(
            size.itemsize * (part.stop - part.start)
            for size in buffers(sizes)
            for _, kept, given in halving_rounds(size.entries, rank, power)
            for part in (kept, given)
        )
        return Fraction(in_rounds + for_the_surplus_rank)


class TopKPlan(MessagePlan):
    """For each flat buffer an all_gather of the largest entries, and one of their indices."""

    def __init__(self, *, topk_ratio: float = 0.01) -> None:
        super().__init__()
        if not 0 < topk_ratio <= 1:
            raise UserError(
                f"topk_ratio: got {topk_ratio}, give a fraction above 0 and at most 1, e.g. 0.01"
            )
        self.topk_ratio = topk_ratio

    def count(self, entries: int) -> int:
        """Return how many of ``entries`` are sent."""
        return min(entries, math.ceil(self.topk_ratio * entries))

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. Each rank adds its residual, then the parts of all ranks."""
        found = []
        for size in buffers(sizes):
            count = self.count(size.entries)
            values, indices = count * size.itemsize, count * index_bytes(size.entries)
            found += [
                Operation("all_gather", values, summed_bytes=size, copied_bytes=size),
                Operation("all_gather", indices, summed_bytes=ranks * values),
            ]
        return found


class LocalSGDPlan(MessagePlan):
    """Every ``averaging_period`` steps an all_reduce for each flat buffer of weights."""

    def __init__(self, *, averaging_period: int = 4) -> None:
        super().__init__()
        if averaging_period < 1:
            raise UserError(
                f"averaging_period: got {averaging_period}, give a number of steps, at least 1"
            )
        self.period = averaging_period

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation("all_reduce", size, copied_bytes=2 * size) for size in buffers(sizes)]


def largest_power(ranks: int) -> int:
    """Return the largest power of two up to ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


def halving_rounds(entries: int, rank: int, power: int) -> list[tuple[int, slice, slice]]:
    """Return each round's partner, the half that ``rank`` keeps and the half that it gives away."""
    rounds, begin, end, distance = [], 0, entries, power // 2
    while distance:
        middle = (begin + end) // 2
        low, high = slice(begin, middle), slice(middle, end)
        kept, given = (high, low) if rank & distance else (low, high)
        rounds.append((rank ^ distance, kept, given))
        begin, end, distance = kept.start, kept.stop, distance // 2
    return rounds


def index_bytes(entries: int) -> int:
    """Return the bytes of an index into ``entries`` entries: those of an int32 if it suffices."""
    return 4 if entries < 2**31 else 8
