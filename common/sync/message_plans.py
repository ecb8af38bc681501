"""What a step of each strategy sends, as a list of messages: one plan for each strategy, all in plain arithmetic.

A strategy's class derives from its plan and adds how the messages are sent. ``common.sync.build_message_plan_from``
builds a plan alone: nothing here imports torch, so that ``lab predict`` answers within a second. The plans of strategies
that fill buckets are in bucket_plans.py.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from common.errors import UserError
from common.sync.message_cost import (
    Operation,
    after_copy,
    buffers,
    payload_sent,
    tree_children,
)

COPIES_PER_PARAMETER = 3
"""Passes through memory beside each collective: into contiguous strides, the division, and back."""


class MessagePlan:
    """Base class of all plans. A plan defines ``operations``; one of sends and receives ``bytes_sent``, too."""

    period = 1
    """Steps after which what a step sends repeats itself."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """List what ``period`` steps send, in order, on the way that takes longest; for the cost model.

        ``sizes`` : bytes of each parameter's gradient, in the order of the parameters; ``GradientSize.of(parameters)``
        for the strategies that look at types and shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it sends")

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """Return the payload bytes that ``rank`` sends in ``period`` steps; with exchanges a strategy must count by itself."""
        return payload_sent(self.operations(sizes, ranks), rank=rank, ranks=ranks)


class NoSyncPlan(MessagePlan):
    """No messages."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return []


class GatherScatterPlan(MessagePlan):
    """For each parameter a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [
            operation
            for size in sizes
            for operation in _through_root(size, ranks, copied_bytes=COPIES_PER_PARAMETER * size)
        ]


class GatherScatterFlatPlan(MessagePlan):
    """For each flat buffer a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [
            operation
            for size in buffers(sizes)
            for operation in _through_root(size, ranks, copied_bytes=size)
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


class TreePlan(MessagePlan):
    """For each flat buffer as many rounds up the tree, and then down, as it has levels."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        levels, found = (ranks - 1).bit_length(), []
        for size in buffers(sizes) if levels else []:
            up = Operation("exchange", size, count=levels, summed_bytes=size)
            found += after_copy(size, [up, Operation("exchange", size, count=levels)])
        return found

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: all to the parent, and all to each child."""
        return Fraction(sum(sizes) * ((rank > 0) + tree_children(rank, ranks)))


class RingPlan(MessagePlan):
    """For each flat buffer N-1 rounds that add chunks up, and N-1 that hand the sums on."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        for size in buffers(sizes) if ranks > 1 else []:
            longest = -(-(size // size.itemsize) // ranks) * size.itemsize
            adding = Operation("exchange", longest, count=ranks - 1, summed_bytes=longest)
            found += after_copy(size, [adding, Operation("exchange", longest, count=ranks - 1)])
        return found

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: all chunks but the next one, then all but the one after that."""

        def chunk(index: int, entries: int) -> int:
            return entries * (index % ranks + 1) // ranks - entries * (index % ranks) // ranks

        return Fraction(
            sum(
                size.itemsize * (2 * entries - chunk(rank + 1, entries) - chunk(rank + 2, entries))
                for size in buffers(sizes)
                for entries in [size // size.itemsize]
            )
        )


class HalvingDoublingPlan(MessagePlan):
    """For each flat buffer rounds of halves, quarters, ... that are added up, and the same backwards."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        power, found = largest_power(ranks), []
        for size in buffers(sizes):
            fold = [size] if ranks > power else []
            halves = [
                -(-(size // size.itemsize) >> level) * size.itemsize
                for level in range(1, power.bit_length())
            ]
            found += after_copy(
                size,
                [Operation("exchange", half, summed_bytes=half) for half in fold + halves]
                + [Operation("exchange", half) for half in halves[::-1] + fold],
            )
        return found

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: the other half in each round, then its own."""
        power, sent = largest_power(ranks), 0
        for size in buffers(sizes):
            if rank >= power:
                sent += size
                continue
            rounds = halving_rounds(size // size.itemsize, rank, power)
            entries = sum(b - a + d - c for _, (a, b), (c, d) in rounds)
            sent += entries * size.itemsize + (rank + power < ranks) * size
        return Fraction(sent)


class TopKPlan(MessagePlan):
    """For each flat buffer an all_gather of the largest entries, and one of their indices."""

    def __init__(self, *, topk_ratio: float = 0.01) -> None:
        super().__init__()
        if not 0 < topk_ratio <= 1:
            raise UserError(
                f"topk_ratio: got {topk_ratio}, give a share above 0 and of at most 1, e.g. 0.01"
            )
        self.topk_ratio = topk_ratio

    def count(self, entries: int) -> int:
        """Return how many of ``entries`` are sent."""
        return min(entries, math.ceil(self.topk_ratio * entries))

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        for size in buffers(sizes):
            entries = size // size.itemsize
            count = self.count(entries)
            values, indices = count * size.itemsize, count * index_bytes(entries)
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


def halving_rounds(
    entries: int, rank: int, power: int
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return, for each round, the partner, the half that ``rank`` keeps and the half that it gives away, as (begin, end)."""
    rounds, begin, end, distance = [], 0, entries, power // 2
    while distance:
        low, high = (begin, (begin + end) // 2), ((begin + end) // 2, end)
        kept, given = (high, low) if rank & distance else (low, high)
        rounds.append((rank ^ distance, kept, given))
        (begin, end), distance = kept, distance // 2
    return rounds


def index_bytes(entries: int) -> int:
    """Return the bytes of an index into ``entries`` entries: of int32 while that suffices, then of int64."""
    return 4 if entries < 2**31 else 8


def _through_root(size: int, ranks: int, *, copied_bytes: int) -> list[Operation]:
    added = (ranks - 1) * size
    gather = Operation("gather", size, summed_bytes=added, copied_bytes=copied_bytes)
    return [gather, Operation("scatter", size)]
