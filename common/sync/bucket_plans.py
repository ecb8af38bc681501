"""What a step sends where gradients go in buckets: the plans of ``overlapped`` and of DistributedDataParallel. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import replace

from common.sync.bucketing import bucket_operations, bucket_sizes
from common.sync.message_cost import GradientSize, Operation, itemsize
from common.sync.message_plans import MessagePlan

POWERSGD_LEAST_GAIN = 2
"""PowerSGD compresses a gradient whose thin matrices are smaller by more than this."""


class OverlappedPlan(MessagePlan):
    """An all_reduce for each bucket, from when backward has filled it."""

    def __init__(self, *, bucket_mb: float | None = None) -> None:
        super().__init__()
        self.bucket_mb = bucket_mb

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return bucket_operations(sizes, self.bucket_mb)


class DDPPlan(MessagePlan):
    """As ``OverlappedPlan``; with ``find_unused_parameters`` one all_reduce more, of 4 bytes a parameter."""

    def __init__(
        self, *, bucket_mb: float | None = None, find_unused_parameters: bool = False
    ) -> None:
        super().__init__()
        self.bucket_mb, self.find_unused_parameters = bucket_mb, find_unused_parameters

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = bucket_operations(sizes, self.bucket_mb, kept_as_built=self.find_unused_parameters)
        return found + _search_for_unused(sizes, self.find_unused_parameters)


class DDPFp16Plan(DDPPlan):
    """As ``DDPPlan``, in entries of 2 bytes."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        in_order = self.find_unused_parameters
        found = [
            Operation(
                "all_reduce", GradientSize(size.shape, 2), copied_bytes=size * 3, ready_bytes=ready
            )
            for size, ready in bucket_sizes(sizes, self.bucket_mb, kept_as_built=in_order)
        ]
        return found + _search_for_unused(sizes, self.find_unused_parameters)


class DDPPowerSGDPlan(MessagePlan):
    """For each type of entries three all_reduces: of what is not compressed, of all P, of all Q. From the third step on."""

    def __init__(self, *, powersgd_rank: int = 2, find_unused_parameters: bool = False) -> None:
        super().__init__()
        self.powersgd_rank, self.find_unused_parameters = powersgd_rank, find_unused_parameters

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found, rank = [], self.powersgd_rank
        for kind in dict.fromkeys(map(itemsize, sizes)):
            alike = [size for size in sizes if itemsize(size) == kind]
            thin = [size for size in alike if is_compressed(_shape(size), rank)]
            ps, qs = (
                [thin_entries(_shape(size), rank)[which] for size in thin] for which in (0, 1)
            )
            first, *others = (
                Operation("all_reduce", GradientSize((entries,), kind))
                for entries in ((sum(alike) - sum(thin)) // kind, sum(ps), sum(qs))
            )
            # Errors are added and taken, copied and kept; gradients go into the bucket.
            found += [
                replace(first, summed_bytes=2 * sum(alike), copied_bytes=2 * sum(alike)),
                *others,
            ]
        return found + _search_for_unused(sizes, self.find_unused_parameters)


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Whether torch's PowerSGD hook sends a gradient of that shape as thin matrices, since these are less than half its size."""
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    return (rows + columns) * min(rows, columns, rank) * POWERSGD_LEAST_GAIN < rows * columns


def thin_entries(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the entries of PowerSGD's P and Q for a gradient of that shape."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * min(rows, columns, rank), columns * min(rows, columns, rank)


def _search_for_unused(sizes: Sequence[int], wanted: bool) -> list[Operation]:
    return [Operation("all_reduce", 4 * len(sizes))] if wanted else []


def _shape(size: int) -> tuple[int, ...]:
    return getattr(size, "shape", (size // itemsize(size),))
