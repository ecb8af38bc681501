"""``--bucket-mb auto``: the size of buckets for which the event model predicts the shortest step.

Small buckets leave early, so backward hides more of them, and nothing but the last one comes after
it; each costs a latency, or the floor of event_model.py. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.cost_model.compute_model import StepCompute
from common.cost_model.event_model import Network, step_seconds
from common.sync import build_message_plan_from
from common.sync.bucketing import AUTO, MIB
from common.sync.message_plans import MessagePlan

SIZES_MB = (1.0, 2.0, 4.0, 6.0, 9.0, 14.0, 25.0, 50.0)
LEAST_GAIN = 0.01  # over the default: less than the event model's own errors is no gain


@dataclass(frozen=True)
class BucketChoice:
    """What was chosen for a strategy; None: the strategy's default sizes."""

    sync: str
    bucket_mb: float | None
    expected_step_seconds: float
    default_step_seconds: float

    def __str__(self) -> str:
        expected = f"expected step {self.expected_step_seconds:.3f} s"
        if self.bucket_mb is None:
            return f"the default, {expected}; no size gains {100 * LEAST_GAIN:g} %"
        return (
            f"{self.bucket_mb:g} MiB, {expected}; with the default {self.default_step_seconds:.3f} "
            "s"
        )


def has_buckets(sync: str) -> bool:
    """Return whether the strategy takes ``bucket_mb``."""
    return hasattr(build_message_plan_from(sync, {}), "bucket_mb")


def choose_buckets(
    sync: str, sizes: Sequence[int], ranks: int, *, network: Network, compute: StepCompute
) -> BucketChoice:
    """Return the best of ``SIZES_MB``, one bucket for all, and the default.

    The default stays unless another size gains more than ``LEAST_GAIN``. Plain arithmetic: ranks
    with equal arguments choose alike. ``sizes`` are those of ``predict_step``.
    """
    plan = build_message_plan_from(sync, {})
    best, seconds = _search(type(plan), sizes, ranks, network, compute)
    return BucketChoice(sync, best, seconds[best], seconds[None])


def chosen_plan(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, *, network: Network, compute: StepCompute
) -> MessagePlan:
    """Return ``plan`` itself, or if its ``bucket_mb`` is "auto", one with the size to choose."""
    if getattr(plan, "bucket_mb", None) != AUTO:
        return plan
    make: Any = type(plan)
    best, _ = _search(make, sizes, ranks, network, compute)
    return make(bucket_mb=best)


def _search(
    make: Any, sizes: Sequence[int], ranks: int, network: Network, compute: StepCompute
) -> tuple[float | None, dict[float | None, float]]:
    """Return the size to choose, and the seconds of a step for each size that was tried.

    make : the class of the strategy's plan.
    """
    whole = float(math.ceil(sum(sizes) / MIB))
    seconds = {
        bucket_mb: step_seconds(
            make(bucket_mb=bucket_mb), sizes, ranks, network=network, compute=compute
        )
        for bucket_mb in (None, *(size for size in SIZES_MB if size < whole), whole)
    }
    best = min(seconds, key=seconds.__getitem__)
    return (best if seconds[best] < (1 - LEAST_GAIN) * seconds[None] else None), seconds
