"""Gradient synchronisation: one strategy is one class in one file, chosen by name.

To add one, write the class and its plan (message_plans.py) and add a line for each here. The
tests, the comparisons and the cost model find both through these dicts.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.utils import registry

if TYPE_CHECKING:
    from common.sync.message_plans import MessagePlan

STRATEGIES = {
    "none": "common.sync.none:NoSync",
    "gather_scatter": "common.sync.gather_scatter:GatherScatter",
    "gather_scatter_flat": "common.sync.gather_scatter_flat:GatherScatterFlat",
    "reduce_broadcast": "common.sync.reduce_broadcast:ReduceBroadcast",
    "all_reduce": "common.sync.all_reduce:AllReduce",
    "all_reduce_flat": "common.sync.all_reduce_flat:AllReduceFlat",
    "tree": "common.sync.tree:Tree",
    "ring": "common.sync.ring:Ring",
    "halving_doubling": "common.sync.halving_doubling:HalvingDoubling",
    "overlapped": "common.sync.overlapped:Overlapped",
    "sharded": "common.sync.sharded:Sharded",
    "ddp": "common.sync.ddp:DDP",
    "ddp_fp16": "common.sync.ddp_fp16:DDPFp16",
    "ddp_powersgd": "common.sync.ddp_powersgd:DDPPowerSGD",
    "ddp_zero1": "common.sync.zero1:DDPZero1",
    "fsdp": "common.sync.fsdp:FSDP",
    "topk": "common.sync.topk:TopK",
    "local_sgd": "common.sync.local_sgd:LocalSGD",
}

# What each strategy sends, for the cost model; importing these imports no torch.
MESSAGE_PLANS = {
    "none": "common.sync.message_plans:NoSyncPlan",
    "gather_scatter": "common.sync.message_plans:GatherScatterPlan",
    "gather_scatter_flat": "common.sync.message_plans:GatherScatterFlatPlan",
    "reduce_broadcast": "common.sync.message_plans:ReduceBroadcastPlan",
    "all_reduce": "common.sync.message_plans:AllReducePlan",
    "all_reduce_flat": "common.sync.message_plans:AllReduceFlatPlan",
    "tree": "common.sync.message_plans:TreePlan",
    "ring": "common.sync.message_plans:RingPlan",
    "halving_doubling": "common.sync.message_plans:HalvingDoublingPlan",
    "overlapped": "common.sync.bucket_plans:OverlappedPlan",
    "sharded": "common.sync.bucket_plans:ShardedPlan",
    "ddp": "common.sync.bucket_plans:DDPPlan",
    "ddp_fp16": "common.sync.bucket_plans:DDPFp16Plan",
    "ddp_powersgd": "common.sync.bucket_plans:DDPPowerSGDPlan",
    "ddp_zero1": "common.sync.built_in_plans:DDPZero1Plan",
    "fsdp": "common.sync.built_in_plans:FSDPPlan",
    "topk": "common.sync.message_plans:TopKPlan",
    "local_sgd": "common.sync.message_plans:LocalSGDPlan",
}

# PyTorch's own, which PartThree offers.
BUILT_IN = tuple(name for name in STRATEGIES if name.startswith(("ddp", "fsdp")))
# The others that exchange anything, which PartTwo offers.
BY_HAND = tuple(name for name in STRATEGIES if name != "none" and name not in BUILT_IN)


def build_sync(name: str, **options: Any) -> Any:
    """Return a new strategy (a ``GradientSync``); ``options`` are those of its class.

    Raises UserError with the choices if the name is unknown.
    """
    return registry.load(STRATEGIES, name, kind="strategy")(**options)


def build_sync_from(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a new strategy, built with those of ``settings`` that its class takes."""
    return _build_from(STRATEGIES, name, settings)


def build_message_plan_from(name: str, settings: Mapping[str, Any]) -> "MessagePlan":
    """Return the message plan of a strategy, built with those of ``settings`` that it takes.

    Imports no torch if the strategy is in ``MESSAGE_PLANS``. Otherwise it builds and returns the
    strategy itself, which serves as its own plan if its class defines ``operations``.

    Raises UserError with the choices if the name is unknown.
    """
    return _build_from(MESSAGE_PLANS if name in MESSAGE_PLANS else STRATEGIES, name, settings)


def _build_from(table: Mapping[str, str], name: str, settings: Mapping[str, Any]) -> Any:
    built = registry.load(table, name, kind="strategy")
    parameters = inspect.signature(built).parameters
    return built(**{key: value for key, value in settings.items() if key in parameters})


def is_exact(name: str) -> bool:
    """Return whether the strategy gives every rank the exact mean gradient.

    Raises UserError with the choices if the name is unknown.
    """
    return registry.load(STRATEGIES, name, kind="strategy").exact
