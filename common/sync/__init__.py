"""Gradient synchronisation: one strategy is one class in one file, chosen by name.

To add one, write the class and its plan (message_plans.py) and add both to ``STRATEGIES``. The
tests, the comparisons and the cost model find them through this dict.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.utils import registry

if TYPE_CHECKING:
    from common.sync.base import GradientSync
    from common.sync.message_plans import MessagePlan

# Each strategy's class and the plan of what it sends. Importing a plan imports no torch.
STRATEGIES = {
    "none": ("common.sync.none:NoSync", "common.sync.message_plans:NoSyncPlan"),
    "gather_scatter": (
        "common.sync.gather_scatter:GatherScatter",
        "common.sync.message_plans:GatherScatterPlan",
    ),
    "gather_scatter_flat": (
        "common.sync.gather_scatter_flat:GatherScatterFlat",
        "common.sync.message_plans:GatherScatterFlatPlan",
    ),
    "reduce_broadcast": (
        "common.sync.reduce_broadcast:ReduceBroadcast",
        "common.sync.message_plans:ReduceBroadcastPlan",
    ),
    "all_reduce": ("common.sync.all_reduce:AllReduce", "common.sync.message_plans:AllReducePlan"),
    "all_reduce_flat": (
        "common.sync.all_reduce_flat:AllReduceFlat",
        "common.sync.message_plans:AllReduceFlatPlan",
    ),
    "tree": ("common.sync.tree:Tree", "common.sync.message_plans:TreePlan"),
    "ring": ("common.sync.ring:Ring", "common.sync.message_plans:RingPlan"),
    "halving_doubling": (
        "common.sync.halving_doubling:HalvingDoubling",
        "common.sync.message_plans:HalvingDoublingPlan",
    ),
    "overlapped": ("common.sync.overlapped:Overlapped", "common.sync.message_plans:OverlappedPlan"),
    "sharded": ("common.sync.sharded:Sharded", "common.sync.message_plans:ShardedPlan"),
    "ddp": ("common.sync.ddp:DDP", "common.sync.message_plans:DDPPlan"),
    "ddp_fp16": ("common.sync.ddp_fp16:DDPFp16", "common.sync.message_plans:DDPFp16Plan"),
    "ddp_powersgd": (
        "common.sync.ddp_powersgd:DDPPowerSGD",
        "common.sync.message_plans:DDPPowerSGDPlan",
    ),
    "ddp_zero1": ("common.sync.ddp_zero1:DDPZero1", "common.sync.message_plans:DDPZero1Plan"),
    "fsdp": ("common.sync.fsdp:FSDP", "common.sync.message_plans:FSDPPlan"),
    "topk": ("common.sync.topk:TopK", "common.sync.message_plans:TopKPlan"),
    "local_sgd": ("common.sync.local_sgd:LocalSGD", "common.sync.message_plans:LocalSGDPlan"),
}

# PyTorch's own, which PartThree offers.
BUILT_IN = tuple(name for name in STRATEGIES if name.startswith(("ddp", "fsdp")))
# The others that exchange anything, which PartTwo offers.
BY_HAND = tuple(name for name in STRATEGIES if name != "none" and name not in BUILT_IN)


def strategy_class(name: str) -> "type[GradientSync]":
    """Return the class of a strategy; UserError with the choices if the name is unknown."""
    return registry.load({one: pair[0] for one, pair in STRATEGIES.items()}, name, kind="strategy")


def plan_class(name: str) -> "type[MessagePlan]":
    """Return the class of a strategy's message plan, without importing torch.

    Raises UserError with the choices if the name is unknown.
    """
    return registry.load({one: pair[1] for one, pair in STRATEGIES.items()}, name, kind="strategy")


def build_sync(name: str, **options: Any) -> "GradientSync":
    """Return a new strategy; ``options`` are those of its plan.

    Raises UserError with the choices if the name is unknown.
    """
    return strategy_class(name)(plan_class(name)(**options))


def build_message_plan_from(name: str, settings: Mapping[str, Any]) -> "MessagePlan":
    """Return the message plan of a strategy, built with those of ``settings`` that it takes.

    A setting of None leaves the plan's default.
    """
    plan = plan_class(name)
    options = inspect.signature(plan).parameters
    return plan(
        **{key: value for key, value in settings.items() if key in options and value is not None}
    )


def is_exact(name: str) -> bool:
    """Return whether the strategy gives every rank the exact mean gradient."""
    return strategy_class(name).exact
