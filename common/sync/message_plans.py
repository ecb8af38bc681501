"""What a step of each strategy sends, as a list of messages.

A strategy has its plan as the attribute ``plan``, with the options of the strategy. Nothing here
imports torch, so `lab predict` can build a plan alone and answer within a second. Each bucket is
filled by the rule in bucketing.py. The functions at the end are what plans and strategies share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from common.errors import UserError
from common.sync.bucketing import bucket_sizes
from common.sync.message_cost import (
    GradientSize,
    Operation,
    buffers,
    sent_bytes,
    tree_children,
    with_shape,
)
from common.utils.grouping import grouped

# Copies for each collective: into contiguous memory, for the division, and back.
COPIES_PER_PARAMETER = 3
INDEX_BYTES = 4  # an int32 finds any entry of a flat buffer up to 8 GB
# PowerSGD compresses a gradient that has more than this many times the entries of P and Q.
POWERSGD_LEAST_GAIN = 2


class MessagePlan:
    """Base class of all plans. A plan defines ``operations``.

    A plan of point-to-point messages also defines ``bytes_sent``. The options of a strategy are the
    keyword arguments of its plan, which raises UserError if one is out of range.
    """

    # Steps after which the messages repeat.
    period = 1

    # Whether each rank's optimiser updates a part of the parameters only.
    shards_update = False

    # When the messages leave, to continue "The messages of <strategy>".
    leave = "leave after backward"

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """List what ``period`` steps send, in order, along the slowest path; for the cost model.

        ``sizes`` : bytes of each parameter's gradient, in the order of the parameters. Strategies
        that look at types and shapes need ``GradientSize.of(parameters)``.
        """
        raise UserError(
            f"{type(self).__name__} lacks operations(), so its time cannot be predicted: write it "
            "(CONTRIBUTING.md says how), or compare with --no-predict"
        )

    def update_share(self, ranks: int) -> float:
        """Return the share of the parameters that each rank's optimiser updates."""
        return 1 / ranks if self.shards_update else 1.0

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
        """List the rounds that add up one flat buffer over two or more ranks."""
        raise NotImplementedError

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. As many rounds pass the sums on, in reverse order.

        The gradients are copied into the buffer before the first round.
        """
        found = []
        for size in buffers(sizes) if ranks > 1 else []:
            first, *others = adding = self.rounds(size, ranks)
            repeats = [replace(first, count=first.count - 1)] if first.count > 1 else []
            passing = [replace(one, summed_bytes=0) for one in reversed(adding)]
            found += [replace(first, count=1, copied_bytes=size), *repeats, *others, *passing]
        return found


class TreePlan(RoundsPlan):
    """For each flat buffer one round up and one round down for each level of the tree."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation("exchange", size, count=(ranks - 1).bit_length(), summed_bytes=size)]

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: everything to the parent, and everything to each child."""
        return Fraction(sum(sizes) * ((rank > 0) + tree_children(rank, ranks)))


class RingPlan(RoundsPlan):
    """For each flat buffer N-1 rounds that add chunks, and N-1 that pass the sums on."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class."""
        longest = -(-size.entries // ranks) * size.itemsize  # the division rounds up
        return [Operation("exchange", longest, count=ranks - 1, summed_bytes=longest)]

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class: first all chunks but its own, then all but the next one."""
        sent = 0
        for size in buffers(sizes):
            shortest, longer_ones = divmod(size.entries, ranks)  # as tensor_split cuts the buffer
            skipped = 2 * shortest + (rank < longer_ones) + ((rank + 1) % ranks < longer_ones)
            sent += (2 * size.entries - skipped) * size.itemsize
        return Fraction(sent)


class HalvingDoublingPlan(RoundsPlan):
    """For each flat buffer rounds that add halves, quarters and so on, then the same in reverse."""

    def rounds(self, size: GradientSize, ranks: int) -> list[Operation]:
        """See the base class. Ranks beyond a power of two cost one round of everything each way."""
        power = largest_power(ranks)
        parts = [size.entries] if ranks > power else []
        parts += [-(-size.entries >> level) for level in range(1, power.bit_length())]
        return [
            Operation("exchange", part * size.itemsize, summed_bytes=part * size.itemsize)
            for part in parts
        ]

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


@dataclass(kw_only=True)
class OverlappedPlan(MessagePlan):
    """An all_reduce for each bucket, as soon as backward has filled it.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1 for the first, then 25, as in
        DistributedDataParallel (bucketing.py).
    """

    bucket_mb: float | None = None
    find_unused_parameters = False  # an option of DDP's alone
    leave = "leave during backward"

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        buckets = bucket_sizes(sizes, self.bucket_mb, kept_as_built=self.find_unused_parameters)
        return [self.bucket_operation(*bucket) for bucket in buckets] + _search_for_unused(
            sizes, self.find_unused_parameters
        )

    def bucket_operation(self, size: GradientSize, ready_bytes: int) -> Operation:
        """Return the all_reduce of one bucket, with the copy into it."""
        return Operation("all_reduce", size, copied_bytes=size, ready_bytes=ready_bytes)


@dataclass(kw_only=True)
class DDPPlan(OverlappedPlan):
    """As ``OverlappedPlan``, perhaps with a search for unused parameters.

    Parameters
    ----------
    find_unused_parameters : let DDP look for parameters that a forward pass left out. It costs a
        walk of the graph and an all_reduce of 4 bytes a parameter, and keeps the buckets in the
        order of the parameters.
    """

    find_unused_parameters: bool = False


class DDPFp16Plan(DDPPlan):
    """As ``DDPPlan``, in entries of 2 bytes."""

    def bucket_operation(self, size: GradientSize, ready_bytes: int) -> Operation:
        """See the base class; rounding to fp16 and back passes over the bucket twice more."""
        half = GradientSize(size.shape, 2)
        return Operation("all_reduce", half, copied_bytes=3 * size, ready_bytes=ready_bytes)


class DDPZero1Plan(DDPPlan):
    """As ``DDPPlan``, then an all_gather of the weights, in one flat buffer for each itemsize.

    A buffer is padded to N equal parts, one for each rank.
    """

    shards_update = True

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. The next forward needs all weights at once."""
        return super().operations(sizes, ranks) + [
            Operation("all_gather", padded_part(size, ranks), needed_bytes=0)
            for size in buffers(sizes)
        ]


@dataclass(kw_only=True)
class DDPPowerSGDPlan(MessagePlan):
    """Three all_reduces for each itemsize: uncompressed gradients, all P, all Q.

    This is what every step from the third on sends.

    Parameters
    ----------
    powersgd_rank : the columns of P and Q.
    find_unused_parameters : as that of ``DDPPlan``.
    """

    powersgd_rank: int = 2
    find_unused_parameters: bool = False

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        for itemsize, alike in grouped((s.itemsize, s) for s in map(with_shape, sizes)).items():
            thin = [size for size in alike if is_compressed(size.shape, self.powersgd_rank)]
            entries = [thin_entries(size.shape, self.powersgd_rank) for size in thin]
            # The error is added to the gradients and subtracted again; both are copied once.
            passes = 2 * sum(alike)
            found += [
                Operation(
                    "all_reduce", sum(alike) - sum(thin), summed_bytes=passes, copied_bytes=passes
                ),
                Operation("all_reduce", itemsize * sum(p for p, _ in entries)),
                Operation("all_reduce", itemsize * sum(q for _, q in entries)),
            ]
        return found + _search_for_unused(sizes, self.find_unused_parameters)


def _search_for_unused(sizes: Sequence[int], wanted: bool) -> list[Operation]:
    return [Operation("all_reduce", 4 * len(sizes))] if wanted else []


@dataclass(kw_only=True)
class ShardedPlan(MessagePlan):
    """A reduce_scatter for each bucket of gradients, then an all_gather for each one of weights.

    A bucket is padded to N equal parts, one for each rank, and reduced as soon as backward has
    filled it. The gathers come in the order of forward, so the last bucket that was reduced is the
    first that is gathered.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket. The default is less than DDP's: the next forward begins
        when the first layers' bucket has arrived.
    """

    bucket_mb: float = 1.0
    shards_update = True
    leave = "leave half during backward and half during the next forward"

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        buckets = [
            (padded_part(size, ranks), size, ready)
            for size, ready in bucket_sizes(sizes, self.bucket_mb)
        ]
        return [
            Operation("reduce_scatter", ranks * part, copied_bytes=size, ready_bytes=ready)
            for part, size, ready in buckets
        ] + [
            Operation("all_gather", part, needed_bytes=sum(sizes) - ready)
            for part, _, ready in reversed(buckets)
        ]


class FSDPPlan(MessagePlan):
    """For each layer two all_gathers of weights, in forward and backward, and a reduce_scatter.

    Each parameter is padded to N equal parts of whole rows. The plan counts Gloo's messages: a
    reduce_scatter is an all_reduce there, and nothing overlaps with computing, so that it costs as
    much as if everything was sent after backward. On NCCL a reduce_scatter sends half.
    """

    shards_update = True
    leave = "leave between the layers of both passes"

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. Backward gathers a layer's weights before it reduces the last one."""
        layers = layers_of(sizes) if ranks > 1 else []
        parts = [sum(part_bytes(size, ranks) for size in layer) for layer in layers]
        gathers = [Operation("all_gather", part, copied_bytes=ranks * part) for part in parts]
        backward = gathers[-1:]
        for index, part in reversed(list(enumerate(parts))):
            reduce = Operation("all_reduce", ranks * part, copied_bytes=ranks * part)
            backward += [*gathers[max(0, index - 1) : index], reduce]
        return gathers + backward


@dataclass(kw_only=True)
class TopKPlan(MessagePlan):
    """For each flat buffer an all_gather of the largest entries, and one of their indices.

    Parameters
    ----------
    topk_ratio : fraction of the entries to send, above 0 and at most 1.
    """

    topk_ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.topk_ratio <= 1:
            raise UserError(
                f"topk_ratio: got {self.topk_ratio}, give a fraction above 0 and at most 1, e.g. "
                "0.01"
            )

    def count(self, entries: int) -> int:
        """Return how many of ``entries`` are sent."""
        return min(entries, math.ceil(self.topk_ratio * entries))

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. Each rank adds its residual, then the parts of all ranks."""
        found = []
        for size in buffers(sizes):
            count = self.count(size.entries)
            values, indices = count * size.itemsize, count * INDEX_BYTES
            found += [
                Operation("all_gather", values, summed_bytes=size, copied_bytes=size),
                Operation("all_gather", indices, summed_bytes=ranks * values),
            ]
        return found


@dataclass(kw_only=True)
class LocalSGDPlan(MessagePlan):
    """Every ``averaging_period`` steps an all_reduce for each flat buffer of weights.

    Parameters
    ----------
    averaging_period : steps from one average to the next.
    """

    averaging_period: int = 4
    leave = "leave once in several steps"

    def __post_init__(self) -> None:
        if self.averaging_period < 1:
            raise UserError(
                f"averaging_period: got {self.averaging_period}, give a number of steps, at least 1"
            )
        self.period = self.averaging_period

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


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Return whether torch's PowerSGD hook sends a gradient of this shape as thin matrices.

    It does if they have less than half of the gradient's entries.
    """
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    return (rows + columns) * min(rows, columns, rank) * POWERSGD_LEAST_GAIN < rows * columns


def thin_entries(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the entries of PowerSGD's P and Q for a gradient of that shape."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * min(rows, columns, rank), columns * min(rows, columns, rank)


def layers_of(sizes: Sequence[int]) -> list[list[GradientSize]]:
    """Return the parameters of each layer: one with two or more dimensions begins a layer.

    So a BatchNorm, which has vectors only, travels with the convolution before it.
    """
    layers: list[list[GradientSize]] = []
    for size in map(with_shape, sizes):
        if len(size.shape) > 1 or not layers:
            layers.append([])
        layers[-1].append(size)
    return layers


def part_bytes(size: GradientSize, ranks: int) -> int:
    """Return the bytes of a rank's part of a parameter: 1/N of its rows, rounded up."""
    rows, *others = size.shape
    return -(-rows // ranks) * math.prod(others) * size.itemsize


def padded_part(size: GradientSize, ranks: int) -> int:
    """Return the bytes of one of N equal parts of a flat buffer; padding rounds up."""
    return -(-size.entries // ranks) * size.itemsize
