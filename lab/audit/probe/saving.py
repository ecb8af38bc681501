"""Files of tensors that the script writes and reads: the records ``saved`` and ``loaded``."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from .state import Probe, named, patch

# By what has such a state, a key of it.
_STATES = {"optimizer": "param_groups", "schedule": "last_epoch", "scaler": "growth_factor"}


def _record(probe: Probe, kind: str, function: Any, args: Any, kwargs: Any) -> None:
    """Write a record of a call of torch.save or torch.load, unless it is of no file."""
    given = named(function, args, kwargs)
    file = given["f"]
    path = getattr(file, "name", file)
    if isinstance(path, (str, os.PathLike)) and path != os.devnull:
        fields = {"step": probe.step, "path": os.path.realpath(path), "at": probe.place()}
        if "obj" in given:
            fields["holds"] = _holds(given["obj"])
        probe.record(kind, **fields)


def _holds(saved: Any) -> list[str]:
    """Return the kinds of what is saved: of an object, or of the entries of a plain dict."""
    kind = _kind(saved)
    if kind != "dict":
        return [kind]
    return sorted(set(map(_kind, saved.values())))


def _kind(value: Any) -> str:
    """Return what a value is, by the keys with which torch's objects save their state."""
    if not isinstance(value, dict):
        return type(value).__name__
    for kind, key in _STATES.items():
        if key in value:
            return kind
    if any(isinstance(held, torch.Tensor) for held in value.values()):
        return "weights"
    return "dict"


def watch(probe: Probe) -> None:
    """Watch torch.save and torch.load."""
    record = probe.guard(_record)

    def call(kind: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        record(probe, kind, original, args, kwargs)
        return original(*args, **kwargs)

    patch(torch, save=functools.partial(call, "saved"), load=functools.partial(call, "loaded"))
