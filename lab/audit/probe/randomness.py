"""Random numbers that samples are made with: the record ``drew``.

The states of the generators are compared right before and after a dataset gives a batch, in the
process that makes it: the script's own or a loader's worker. Reading them draws nothing.
"""

from __future__ import annotations

import functools
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


def _states() -> dict[str, int]:
    """Return hashes of the states of the modules' generators, by their names."""
    states = {"torch": torch_state(), "random": zlib.crc32(repr(random.getstate()).encode())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        parts = [*map(plain, numpy.get_state())]
        states["numpy.random"] = zlib.crc32(repr(parts).encode())
    return states


def _record(probe: Probe, indices: Any, before: dict[str, int], after: dict[str, int]) -> None:
    """Write the record ``drew`` of the generators that a batch was made with, if there are any."""
    drawn = {name: state for name, state in before.items() if state != after[name]}
    if drawn:
        probe.record("drew", indices=plain_indices(indices), states=drawn)


def watch(probe: Probe) -> None:
    """Watch how datasets make batches."""
    states = probe.guard(_states)
    record = probe.guard(functools.partial(_record, probe))

    def fetch(original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        before = states()
        batch = original(fetcher, indices)
        record(indices, before, states())
        return batch

    patch(_MapDatasetFetcher, fetch=fetch)
