"""Gradient synchronisation: one strategy is one class in one file, chosen by name.

Each has a record in ``STRATEGIES``: its class, its plan (plans/), the part that offers it, its
label, colour and marker. The parts, the comparison, the cost model, the memory model, the figures
and the tests find a strategy through this dict; its options are the fields of its plan.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from common.say import listed
from common.sync.plans.base import MessagePlan, Option, lacks_memory
from common.utils import registry

if TYPE_CHECKING:
    from common.sync.base import GradientSync

Part = Literal["PartOne", "PartTwo", "PartThree"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What there is to know about a strategy without importing torch.

    Parameters
    ----------
    implementation : its class, as "module:Class".
    plan : the class of its message plan; importing it imports no torch.
    part : which offers it: one process, strategies written by hand, or PyTorch's own.
    label : what people call it.
    color, marker : of its points in figures, as matplotlib names them; None: lab/strategy_style.py
        gives it a colour that no other strategy has.
    """

    implementation: str
    plan: str
    part: Part
    label: str
    color: str | None = None
    marker: str | None = None


# Related strategies share a hue, but not the marker. Every colour has a contrast of at least 3 to a
# light and to a dark page, and is no section's (lab/plot_style.py).
STRATEGIES: dict[str, Strategy] = {
    "none": Strategy(
        implementation="common.sync.none:NoSync",
        plan="common.sync.plans.base:NoSyncPlan",
        part="PartOne",
        label="one process",
        color="#8f8a7c",
        marker="o",
    ),
    "gather_scatter": Strategy(
        implementation="common.sync.gather_scatter:GatherScatter",
        plan="common.sync.plans.root:GatherScatterPlan",
        part="PartTwo",
        label="gather and scatter",
        color="#8148d6",
        marker="s",
    ),
    "gather_scatter_flat": Strategy(
        implementation="common.sync.gather_scatter_flat:GatherScatterFlat",
        plan="common.sync.plans.root:GatherScatterFlatPlan",
        part="PartTwo",
        label="gather and scatter in one buffer",
        color="#a07cf0",
        marker="^",
    ),
    "reduce_broadcast": Strategy(
        implementation="common.sync.reduce_broadcast:ReduceBroadcast",
        plan="common.sync.plans.root:ReduceBroadcastPlan",
        part="PartTwo",
        label="reduce and broadcast",
        color="#8d63a8",
        marker="v",
    ),
    "all_reduce": Strategy(
        implementation="common.sync.all_reduce:AllReduce",
        plan="common.sync.plans.rings:AllReducePlan",
        part="PartTwo",
        label="all_reduce",
        color="#c0358f",
        marker="D",
    ),
    "all_reduce_flat": Strategy(
        implementation="common.sync.all_reduce_flat:AllReduceFlat",
        plan="common.sync.plans.rings:AllReduceFlatPlan",
        part="PartTwo",
        label="all_reduce in one buffer",
        color="#de67b2",
        marker="d",
    ),
    "tree": Strategy(
        implementation="common.sync.tree:Tree",
        plan="common.sync.plans.rings:TreePlan",
        part="PartTwo",
        label="tree",
        color="#0b7a86",
        marker="P",
    ),
    "ring": Strategy(
        implementation="common.sync.ring:Ring",
        plan="common.sync.plans.rings:RingPlan",
        part="PartTwo",
        label="ring by hand",
        color="#17a0b0",
        marker="X",
    ),
    "halving_doubling": Strategy(
        implementation="common.sync.halving_doubling:HalvingDoubling",
        plan="common.sync.plans.rings:HalvingDoublingPlan",
        part="PartTwo",
        label="halving and doubling",
        color="#4f8f8f",
        marker="h",
    ),
    "hierarchical": Strategy(
        implementation="common.sync.hierarchical:Hierarchical",
        plan="common.sync.plans.hierarchical:HierarchicalPlan",
        part="PartTwo",
        label="hierarchical",
        color="#2f6f5e",
        marker="D",
    ),
    "overlapped": Strategy(
        implementation="common.sync.overlapped:Overlapped",
        plan="common.sync.plans.buckets:OverlappedPlan",
        part="PartTwo",
        label="overlapped by hand",
        color="#7d7411",
        marker="p",
    ),
    "sharded": Strategy(
        implementation="common.sync.sharded:Sharded",
        plan="common.sync.plans.sharded:ShardedPlan",
        part="PartTwo",
        label="sharded by hand",
        color="#a08658",
        marker="s",
    ),
    "ddp": Strategy(
        implementation="common.sync.ddp:DDP",
        plan="common.sync.plans.buckets:DDPPlan",
        part="PartThree",
        label="DistributedDataParallel",
        color="#9b9221",
        marker="*",
    ),
    "ddp_fp16": Strategy(
        implementation="common.sync.ddp_fp16:DDPFp16",
        plan="common.sync.plans.buckets:DDPFp16Plan",
        part="PartThree",
        label="DDP in half precision",
        color="#a0506e",
        marker="<",
    ),
    "ddp_powersgd": Strategy(
        implementation="common.sync.ddp_powersgd:DDPPowerSGD",
        plan="common.sync.plans.lossy:DDPPowerSGDPlan",
        part="PartThree",
        label="DDP with PowerSGD",
        color="#d9486f",
        marker=">",
    ),
    "ddp_zero1": Strategy(
        implementation="common.sync.ddp_zero1:DDPZero1",
        plan="common.sync.plans.sharded:DDPZero1Plan",
        part="PartThree",
        label="DDP with a sharded optimiser",
        color="#6f7436",
        marker="^",
    ),
    "fsdp": Strategy(
        implementation="common.sync.fsdp:FSDP",
        plan="common.sync.plans.sharded:FSDPPlan",
        part="PartThree",
        label="PyTorch's fully_shard",
        color="#a9727a",
        marker="v",
    ),
    "topk": Strategy(
        implementation="common.sync.topk:TopK",
        plan="common.sync.plans.lossy:TopKPlan",
        part="PartTwo",
        label="top-k with error feedback",
        color="#84604f",
        marker="8",
    ),
    "local_sgd": Strategy(
        implementation="common.sync.local_sgd:LocalSGD",
        plan="common.sync.plans.lossy:LocalSGDPlan",
        part="PartTwo",
        label="local SGD",
        color="#b08a72",
        marker="H",
    ),
}


def offered_by(part: Part) -> tuple[str, ...]:
    """Return the names of the strategies that a part offers."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.part == part)


BUILT_IN = offered_by("PartThree")
BY_HAND = offered_by("PartTwo")


def strategy_class(name: str) -> "type[GradientSync]":
    """Return the class of a strategy; UserError with the choices if the name is unknown."""
    return resolve_name(registry.find(STRATEGIES, name, kind="strategy").implementation)


def plan_class(name: str) -> type[MessagePlan]:
    """Return the class of a strategy's message plan, without importing torch.

    Raises UserError with the choices if the name is unknown, and if the plan lacks a method.
    """
    plan: type[MessagePlan] = resolve_name(registry.find(STRATEGIES, name, kind="strategy").plan)
    if plan.memory is MessagePlan.memory:
        raise lacks_memory(plan)
    return plan


def build_sync(name: str, **options: Any) -> "GradientSync":
    """Return a new strategy; ``options`` are those of its plan.

    Raises UserError with the choices if the name is unknown.
    """
    return strategy_class(name)(plan_class(name)(**options))


def build_message_plan_from(name: str, settings: Mapping[str, Any]) -> MessagePlan:
    """Return the message plan of a strategy, built with those of ``settings`` that it takes.

    A setting of None leaves the plan's default.
    """
    plan = plan_class(name)
    options = inspect.signature(plan).parameters
    return plan(
        **{key: value for key, value in settings.items() if key in options and value is not None}
    )


def strategy_options() -> dict[str, Option]:
    """Return every option of any strategy, by name; its help says first which strategies take it.

    The default is None where it depends on the strategy.
    """
    found: dict[str, Option] = {}
    takers: dict[str, list[str]] = {}
    for name in STRATEGIES:
        for option in plan_class(name).options():
            takers.setdefault(option.name, []).append(name)
            known = found.setdefault(option.name, option)
            if option.default != known.default:
                found[option.name] = replace(known, default=None)
    in_order = sorted(found.values(), key=lambda option: option.kind is int)  # counts come last
    return {
        option.name: replace(option, help=f"for {listed(takers[option.name])}: {option.help}")
        for option in in_order
    }


def is_exact(name: str) -> bool:
    """Return whether the strategy gives every rank the exact mean gradient."""
    return strategy_class(name).exact
