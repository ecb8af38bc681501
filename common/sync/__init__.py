"""Gradient synchronisation: one strategy is one class in one file, chosen by name.

To add one, write the class and add a line here; the tests and comparisons find it through this dict.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from common.utils import registry

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
    "ddp": "common.sync.ddp:DDP",
    "ddp_fp16": "common.sync.ddp_fp16:DDPFp16",
    "ddp_powersgd": "common.sync.ddp_powersgd:DDPPowerSGD",
    "topk": "common.sync.topk:TopK",
    "local_sgd": "common.sync.local_sgd:LocalSGD",
}

BUILT_IN = tuple(name for name in STRATEGIES if name.startswith("ddp"))
"""PyTorch's DistributedDataParallel, which PartThree offers."""
BY_HAND = tuple(name for name in STRATEGIES if name != "none" and name not in BUILT_IN)
"""The others that exchange anything, which PartTwo offers."""


def build_sync(name: str, **options: Any) -> Any:
    """Return a new strategy (a ``GradientSync``) of that name, made with its class's ``options``.

    Raises UserError with the choices if the name is unknown.
    """
    return registry.load(STRATEGIES, name, kind="strategy")(**options)


def build_sync_from(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a new strategy with those of ``settings`` that its class takes, by name."""
    taken = inspect.signature(registry.load(STRATEGIES, name, kind="strategy")).parameters
    return build_sync(name, **{key: value for key, value in settings.items() if key in taken})


def is_exact(name: str) -> bool:
    """Return whether the strategy of that name leaves every rank the plain mean. UserError if it is unknown."""
    return registry.load(STRATEGIES, name, kind="strategy").exact
