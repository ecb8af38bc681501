"""Plans of the strategies that send buckets of gradients while backward continues."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.sync.bucketing import bucket_sizes
from common.sync.message_cost import GradientSize, Operation
from common.sync.plans.base import ReplicatedPlan, option
from common.utils.limits import AboveZero


def bucket_option(default: float | None) -> Any:
    """Return the option ``bucket_mb`` of a plan with buckets."""
    return option(
        default,
        "MiB of gradients that are sent together; lab predict and lab compare --sync ddp-auto "
        "choose one for your network",
        defaults="1 in the first bucket, then 25, like DistributedDataParallel; 1 for sharded",
        auto=True,
    )


@dataclass(kw_only=True)
class OverlappedPlan(ReplicatedPlan):
    """An all_reduce for each bucket, as soon as backward has filled it.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1 for the first, then 25, as in
        DistributedDataParallel (bucketing.py).
    """

    bucket_mb: AboveZero | None = bucket_option(None)
    find_unused_parameters = False  # an option of DDP's alone
    leave = "leave during backward"

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        buckets = bucket_sizes(sizes, self.bucket_mb, kept_as_built=self.find_unused_parameters)
        found = [self.bucket_operation(size, ready_bytes) for size, ready_bytes in buckets]
        if self.find_unused_parameters:
            found.append(search_for_unused(sizes))
        return found

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
        """See the base class; rounding to fp16 and back passes over the bucket twice more.

        Gradients of 2 bytes leave as they are.
        """
        if size.itemsize == 2:
            return super().bucket_operation(size, ready_bytes)
        half = GradientSize(size.shape, 2)
        return Operation("all_reduce", half, copied_bytes=3 * size, ready_bytes=ready_bytes)


def search_for_unused(sizes: Sequence[int]) -> Operation:
    """Return the all_reduce by which DDP's ranks agree on the parameters that none has used."""
    return Operation("all_reduce", 4 * len(sizes))
