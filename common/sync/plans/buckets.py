"""Plans of the strategies that send buckets of gradients while backward continues."""

from dataclasses import dataclass
from typing import Any

from common.sync.plans.base import ReplicatedPlan, option
from common.sync.plans.lines import ENTRIES, GRADIENTS, SIZE, PlanLine, for_each
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


SEARCH_FOR_UNUSED = for_each(
    "model", PlanLine("all_reduce", 4 * GRADIENTS, only_if="find_unused_parameters")
)
"""The all_reduce by which DDP's ranks agree on the parameters that none has used."""


@dataclass(kw_only=True)
class OverlappedPlan(ReplicatedPlan):
    """An all_reduce for each bucket, as soon as backward has filled it.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1 for the first, then 25, as in
        DistributedDataParallel (bucketing.py).
    """

    bucket_mb: AboveZero | None = bucket_option(None)
    leave = "leave during backward"

    messages = for_each("bucket", PlanLine("all_reduce", SIZE, copied=SIZE, when="in backward"))


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

    messages = OverlappedPlan.messages + SEARCH_FOR_UNUSED


class DDPFp16Plan(DDPPlan):
    """As ``DDPPlan``, in entries of 2 bytes; gradients that have these leave as they are.

    The bucket is rounded to fp16 and back.
    """

    messages = (
        for_each(
            "bucket",
            PlanLine(
                "all_reduce", SIZE, copied=SIZE, when="in backward", only_if="entries of 2 bytes"
            ),
            PlanLine(
                "all_reduce",
                2 * ENTRIES,
                copied=SIZE,
                compressor="cast",
                compressed=SIZE,
                when="in backward",
                only_if="other entries",
            ),
        )
        + SEARCH_FOR_UNUSED
    )
