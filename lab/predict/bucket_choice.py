"""The size of buckets for which the event model predicts the shortest step. Imports no torch.

Small buckets leave early, so backward hides more of them, and only the last one comes after it;
each costs a latency, or the floor of event_model.py.
"""

import math
from collections.abc import Sequence
from typing import Any

from common.sync import build_message_plan_from
from common.sync.bucketing import MIB
from common.sync.plans.base import AUTO, MessagePlan
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import Network, step_seconds

SIZES_MB = (1.0, 2.0, 4.0, 6.0, 9.0, 14.0, 25.0, 50.0)
LEAST_GAIN = 0.01  # over the default: less than the event model's own errors is no gain


def has_buckets(sync: str) -> bool:
    """Return whether the strategy takes ``bucket_mb``."""
    return hasattr(build_message_plan_from(sync, {}), "bucket_mb")


def with_best_buckets(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, *, network: Network, compute: StepCompute
) -> MessagePlan:
    """Return ``plan`` itself, or if its ``bucket_mb`` is "auto", one with the best size.

    It tries ``SIZES_MB``, one bucket for all, and the default, which stays unless another size
    gains more than ``LEAST_GAIN``. ``sizes`` are those of ``predict_step``.
    """
    if getattr(plan, "bucket_mb", None) != AUTO:
        return plan
    make: Any = type(plan)
    whole = float(math.ceil(sum(sizes) / MIB))
    default = make()
    others = [make(bucket_mb=size) for size in (*SIZES_MB, whole) if size <= whole]

    def seconds(tried: MessagePlan) -> float:
        return step_seconds(tried, sizes, ranks, network=network, compute=compute)

    best = min(others, key=seconds)
    if seconds(best) < (1 - LEAST_GAIN) * seconds(default):
        return best
    return default
