"""Gradient synchronisation: one strategy is one class in one file, chosen by name.

To add one, write the class and add a line here; the tests and comparisons find it through this dict.
"""

from typing import Any

from common import registry

STRATEGIES = {
    "none": "common.sync.none:NoSync",
    "gather_scatter": "common.sync.gather_scatter:GatherScatter",
    "all_reduce": "common.sync.all_reduce:AllReduce",
    "ddp": "common.sync.ddp:DDP",
}


def build_sync(name: str, **options: Any) -> Any:
    """Return a new strategy (a ``GradientSync``) of that name, made with its class's ``options``.

    Raises UserError with the choices if the name is unknown.
    """
    return registry.load(STRATEGIES, name, kind="strategy")(**options)
