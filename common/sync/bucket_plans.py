"""What a step sends in buckets: ``overlapped``, ``sharded`` and DDP's three strategies.

Like message_plans.py, this file imports no torch.
"""

import math
from collections.abc import Sequence

from common.sync.bucketing import bucket_sizes
from common.sync.message_cost import GradientSize, Operation, with_shape
from common.sync.message_plans import MessagePlan
from common.utils.grouping import grouped

# PowerSGD compresses a gradient that has more than this many times the entries of P and Q.
POWERSGD_LEAST_GAIN = 2
# Less than DDP's: the next forward begins when the first layers' bucket has arrived.
SHARDED_BUCKET_MB = 1.0


class DDPPlan(MessagePlan):
    """An all_reduce for each bucket, as soon as backward has filled it.

    ``find_unused_parameters`` adds one all_reduce of 4 bytes a parameter.
    """

    def __init__(
        self, *, bucket_mb: float | None = None, find_unused_parameters: bool = False
    ) -> None:
        super().__init__()
        self.bucket_mb, self.find_unused_parameters = bucket_mb, find_unused_parameters

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        in_order = self.find_unused_parameters
        return [
            self.bucket_operation(size, ready)
            for size, ready in bucket_sizes(sizes, self.bucket_mb, kept_as_built=in_order)
        ] + _search_for_unused(sizes, self.find_unused_parameters)

    def bucket_operation(self, size: GradientSize, ready_bytes: int) -> Operation:
        """Return the all_reduce of one bucket, with the copy into it."""
        return Operation("all_reduce", size, copied_bytes=size, ready_bytes=ready_bytes)


class DDPFp16Plan(DDPPlan):
    """As ``DDPPlan``, in entries of 2 bytes."""

    def bucket_operation(self, size: GradientSize, ready_bytes: int) -> Operation:
        """See the base class; rounding to fp16 and back passes over the bucket twice more."""
        half = GradientSize(size.shape, 2)
        return Operation("all_reduce", half, copied_bytes=3 * size, ready_bytes=ready_bytes)


class OverlappedPlan(DDPPlan):
    """As ``DDPPlan``, without the search for unused parameters."""

    def __init__(self, *, bucket_mb: float | None = None) -> None:
        super().__init__(bucket_mb=bucket_mb)


class ShardedPlan(MessagePlan):
    """A reduce_scatter for each bucket of gradients, then an all_gather for each one of weights.

    A bucket is padded to N equal parts, one for each rank, and reduced as soon as backward has
    filled it. The gathers come in the order of forward, so the last bucket that was reduced is the
    first that is gathered.
    """

    def __init__(self, *, bucket_mb: float | None = None) -> None:
        super().__init__()
        self.bucket_mb = SHARDED_BUCKET_MB if bucket_mb is None else bucket_mb

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        reduces, gathers = [], []
        for size, ready in bucket_sizes(sizes, self.bucket_mb):
            part = -(-size.entries // ranks) * size.itemsize  # each rank's
            reduces.append(
                Operation("reduce_scatter", ranks * part, copied_bytes=size, ready_bytes=ready)
            )
            gathers.append(Operation("all_gather", part, needed_bytes=sum(sizes) - ready))
        return reduces + gathers[::-1]

    def update_share(self, ranks: int) -> float:
        """See the base class."""
        return 1 / ranks


class DDPPowerSGDPlan(MessagePlan):
    """Three all_reduces for each itemsize: uncompressed gradients, all P, all Q.

    This is what every step from the third on sends.
    """

    def __init__(self, *, powersgd_rank: int = 2, find_unused_parameters: bool = False) -> None:
        super().__init__()
        self.powersgd_rank, self.find_unused_parameters = powersgd_rank, find_unused_parameters

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        by_itemsize = grouped((size.itemsize, size) for size in map(with_shape, sizes))
        for itemsize, alike in by_itemsize.items():
            thin = [size for size in alike if is_compressed(size.shape, self.powersgd_rank)]
            entries = [thin_entries(size.shape, self.powersgd_rank) for size in thin]
            plain, ps, qs = (
                GradientSize((count,), itemsize)
                for count in (
                    (sum(alike) - sum(thin)) // itemsize,
                    sum(p for p, _ in entries),
                    sum(q for _, q in entries),
                )
            )
            # The error is added to the gradients and subtracted again; both are copied once.
            passes = 2 * sum(alike)
            found += [
                Operation("all_reduce", plain, summed_bytes=passes, copied_bytes=passes),
                Operation("all_reduce", ps),
                Operation("all_reduce", qs),
            ]
        return found + _search_for_unused(sizes, self.find_unused_parameters)


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


def _search_for_unused(sizes: Sequence[int], wanted: bool) -> list[Operation]:
    return [Operation("all_reduce", 4 * len(sizes))] if wanted else []
