"""Files of tensors that the script writes and reads: the records ``saved`` and ``loaded``."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from .state import Probe, named, patch


def _record(probe: Probe, kind: str, function: Any, args: Any, kwargs: Any) -> None:
    """Write a record of a call of torch.save or torch.load, unless it is of no file."""
    file = named(function, args, kwargs)["f"]
    path = getattr(file, "name", file)
    if isinstance(path, (str, os.PathLike)) and path != os.devnull:
        path = os.path.realpath(path)
        probe.record(kind, step=probe.step, path=path, at=probe.place())


def watch(probe: Probe) -> None:
    """Watch torch.save and torch.load."""
    record = probe.guard(_record)

    def call(kind: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        record(probe, kind, original, args, kwargs)
        return original(*args, **kwargs)

    patch(torch, save=functools.partial(call, "saved"), load=functools.partial(call, "loaded"))
