"""The strategies' plans without torch, whose import alone takes seconds: ``plans`` builds strategies that can say what they
send, and nothing else.

While their modules are imported, names of torch stand for nothing. What a plan needs is arithmetic; one that needs torch all
the same is built again with it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import common.sync.message_cost  # noqa: F401 - it and the errors stay, so that their classes are the same for all
from common.cost_model.event_model import MessagePlan
from common.errors import UserError
from common.sync import STRATEGIES, build_sync_from

_TRIAL_SIZES, _TRIAL_RANKS = (4_096, 4), (2, 5)


class _NothingMeta(type):
    """Every name in it, and whatever it is called with, is itself again."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _key: Any) -> type:
        return cls

    def __call__(cls, *_arguments: Any, **_more: Any) -> type:
        return cls


class _Nothing(metaclass=_NothingMeta):
    """Stands for whatever is imported from torch: a base class, a decorator, a type in a signature."""


@dataclass(frozen=True)
class _EntryType:
    """What a plan asks of a torch.dtype."""

    itemsize: int


_ENTRY_TYPES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class _EmptyTorch(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None
        )

    def exec_module(self, module: ModuleType) -> None:
        def nothing(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return _EntryType(_ENTRY_TYPES[name]) if name in _ENTRY_TYPES else _Nothing

        module.__getattr__ = nothing


@contextmanager
def _empty_torch() -> Iterator[None]:
    """Import torch as nothing; what was imported meanwhile of this project is forgotten afterwards, as torch is."""
    before, finder = set(sys.modules), _EmptyTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("torch", "common"):
                del sys.modules[name]


def plans(names: Sequence[str], options: Mapping[str, Any] | None = None) -> dict[str, MessagePlan]:
    """Return the strategies of these names, built with those of ``options`` that each takes; torch is imported only if it
    must. UserError with the choices where a name is unknown."""
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise UserError(
            f"--sync: got {', '.join(unknown)}, choose from {', '.join(STRATEGIES)}, or all"
        )
    if "torch" in sys.modules:
        return {name: build_sync_from(name, options or {}) for name in names}
    found: dict[str, MessagePlan] = {}
    with _empty_torch():
        for name in names:
            plan = _try(name, options or {})
            if plan is not None:
                found[name] = plan
    return {
        name: found[name] if name in found else build_sync_from(name, options or {})
        for name in names
    }


def _try(name: str, options: Mapping[str, Any]) -> MessagePlan | None:
    """The strategy, if it can be built and tells its plan without torch."""
    try:
        plan = build_sync_from(name, options)
        for ranks in _TRIAL_RANKS:
            plan.bytes_sent(_TRIAL_SIZES, 0, ranks)
        return plan
    except NotImplementedError:
        return plan
    except UserError:
        raise
    except (
        Exception
    ):  # whatever a name of torch that means nothing may lead to; with torch the true error shows
        return None
