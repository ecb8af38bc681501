"""Plans of the strategies that send less than the whole gradient, or less often.

The functions at the end say what PowerSGD compresses; its strategy shares them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from common.sync.memory_cost import Memory, MemoryCase, replicated
from common.sync.message_cost import Operation, buffers, with_shape
from common.sync.plans.base import MessagePlan, ReplicatedPlan, option
from common.sync.plans.buckets import search_for_unused
from common.utils.grouping import grouped
from common.utils.limits import Fraction, Positive

INDEX_BYTES = 4  # an int32 finds any entry of a flat buffer up to 8 GB
# PowerSGD compresses a gradient that has more than this many times the entries of P and Q.
POWERSGD_LEAST_GAIN = 2


@dataclass(kw_only=True)
class TopKPlan(MessagePlan):
    """For each flat buffer an all_gather of the largest entries, and one of their indices.

    Parameters
    ----------
    topk_ratio : fraction of the entries to send, above 0 and at most 1.
    """

    topk_ratio: Fraction = option(0.01, "share of the gradient's entries that a rank sends")

    def count(self, entries: int) -> int:
        """Return how many of ``entries`` are sent."""
        return min(entries, math.ceil(self.topk_ratio * entries))

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. Each rank adds its residual, then the parts of all ranks."""
        found = []
        for size in buffers(sizes):
            count = self.count(size.entries)
            values = count * size.itemsize
            found += [
                Operation("all_gather", values, summed_bytes=size, copied_bytes=size),
                Operation("all_gather", count * INDEX_BYTES, summed_bytes=ranks * values),
            ]
        return found

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: also the residual, which has the gradients' size."""
        return replicated(case) | {"buckets": sum(case.sizes)}


@dataclass(kw_only=True)
class DDPPowerSGDPlan(MessagePlan):
    """Three all_reduces for each itemsize: uncompressed gradients, all P, all Q.

    This is what every step from the third on sends.

    Parameters
    ----------
    powersgd_rank : the columns of P and Q.
    find_unused_parameters : as that of ``DDPPlan``.
    """

    powersgd_rank: Annotated[int, Meta(ge=1, le=1024)] = option(
        2, "rank of the matrices that approximate a gradient"
    )
    find_unused_parameters: bool = False

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        by_itemsize = grouped((size.itemsize, size) for size in map(with_shape, sizes))
        for itemsize, alike in by_itemsize.items():
            thin = [size for size in alike if is_compressed(size.shape, self.powersgd_rank)]
            entries = [thin_entries(size.shape, self.powersgd_rank) for size in thin]
            uncompressed = sum(alike) - sum(thin)
            # The error is added to the gradients and subtracted again; both are copied once.
            passes = 2 * sum(alike)
            found += [
                Operation("all_reduce", uncompressed, summed_bytes=passes, copied_bytes=passes),
                Operation("all_reduce", itemsize * sum(p for p, _ in entries)),
                Operation("all_reduce", itemsize * sum(q for _, q in entries)),
            ]
        if self.find_unused_parameters:
            found.append(search_for_unused(sizes))
        return found

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: also the errors, of the gradients' size, and P and Q of each one."""
        buckets: int = sum(case.sizes)
        for size in case.sizes:
            if is_compressed(size.shape, self.powersgd_rank):
                entries = thin_entries(size.shape, self.powersgd_rank)
                buckets += sum(entries) * size.itemsize
        return replicated(case) | {"buckets": buckets}


@dataclass(kw_only=True)
class LocalSGDPlan(ReplicatedPlan):
    """Every ``averaging_period`` steps an all_reduce for each flat buffer of weights.

    Parameters
    ----------
    averaging_period : steps from one average to the next.
    """

    averaging_period: Positive = option(4, "steps between two averages of the weights")
    leave = "leave once in several steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.period = self.averaging_period

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return [Operation("all_reduce", size, copied_bytes=2 * size) for size in buffers(sizes)]


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Return whether torch's PowerSGD hook sends a gradient of this shape as thin matrices.

    It does if they have less than half of the gradient's entries.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return (rows + columns) * min(rows, columns, rank) * POWERSGD_LEAST_GAIN < rows * columns


def thin_entries(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the entries of PowerSGD's P and Q for a gradient of that shape."""
    rows = shape[0]
    columns = math.prod(shape[1:])
    width = min(rows, columns, rank)
    return rows * width, columns * width
