"""Random numbers that samples are made with: the record ``drew``.

The states of the generators are compared right before and after a dataset gives a batch, in the
process that makes it: the script's own or a loader's worker. Reading them draws nothing.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from .data import plain, plain_indices
from .sampling import checksum
from .state import Probe, patch


def torch_state() -> int:
    """Return a hash of the states of torch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return checksum(states)


def _states(dataset: Any) -> dict[str, int]:
    """Return hashes of the states of all generators that a dataset may draw from, by their names.

    Those are the modules', and what the dataset or one within it holds as an attribute.
    """
    numpy = sys.modules.get("numpy.random")
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy is not None:
        states["numpy.random"] = [*map(plain, numpy.get_state())]
    while dataset is not None:
        held = dict(getattr(dataset, "__dict__", {}))
        for name, value in held.items():
            state = _state_of(value)
            if state is not None:
                states[f"{type(dataset).__name__}.{name}"] = state
        dataset = held.get("dataset")
    hashes = {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}
    return {"torch": torch_state(), **hashes}


def _state_of(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return checksum([value.get_state()])
    return getattr(getattr(value, "bit_generator", None), "state", None)  # numpy's


def watch(probe: Probe) -> None:
    """Watch how datasets make batches."""
    states = probe.guard(_states)

    def fetch(original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        before = states(fetcher.dataset)
        batch = original(fetcher, indices)
        after = states(fetcher.dataset)
        if before and after:
            drawn = {name: state for name, state in before.items() if state != after.get(name)}
            if drawn:
                probe.record("drew", indices=plain_indices(indices), states=drawn)
        return batch

    patch(_MapDatasetFetcher, fetch=fetch)
