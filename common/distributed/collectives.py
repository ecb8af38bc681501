"""Collectives other than gradient sync: compare settings, run an action, gather and send objects.

Every rank calls them, and each raises its UserError on all ranks. An error of one rank anywhere
else reaches the others by failures.py.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from common.checkpoint import load_checkpoint
from common.distributed.process_group import World
from common.errors import UserError, reason_of
from common.utils.grouping import grouped
from common.utils.hashing import digest
from common.utils.processes import in_thread

T = TypeVar("T")
_FIRST_PAUSE_SECONDS = 0.02


def check_same_on_all_ranks(world: World, facts: Mapping[str, Any], *, what: str) -> None:
    """Raise UserError naming each fact that differs between ranks, with its values and their ranks.

    If all are the same, it sends one all_reduce of 64 bytes, whatever the number of ranks.
    ``facts`` are plain values by name, e.g. settings or tensor shapes.
    """
    if world.size == 1:
        return
    facts_bytes = json.dumps(facts, sort_keys=True, default=str).encode()
    mine = bytearray(hashlib.sha256(facts_bytes).digest())
    # (4,) int64. The largest of all complements is the complement of the smallest.
    words = torch.frombuffer(mine, dtype=torch.int64).to(world.device)
    largest = torch.stack([words, ~words])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if torch.equal(largest[0], ~largest[1]):  # every rank decides the same
        return
    all_facts = gather_objects(world, dict(facts))
    names = dict.fromkeys(name for one in all_facts for name in one)
    values = {name: [one.get(name, "absent") for one in all_facts] for name in names}
    lines = [
        f"{name}: {_values_text(of_ranks)}"
        for name, of_ranks in values.items()
        if any(value != of_ranks[0] for value in of_ranks)
    ]
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(
        f"the ranks differ in {what}. {'; '.join(lines[:5])}{more}. Start every rank with the same "
        "command except --rank, with the same code and data"
    )


def _values_text(values: Sequence[Any]) -> str:
    """Return each value with the ranks that have it, e.g. "0.1 on rank 0, 0.2 on ranks 1, 2"."""
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        f"{' …' if len(ranks) > 8 else ''}"
        for value, ranks in grouped((str(value), rank) for rank, value in enumerate(values)).items()
    )


def run_on_all_ranks(world: World, action: Callable[[], T], *, patient: bool = False) -> T:
    """Run ``action`` on every rank; if one raises UserError or OSError, raise UserError on all.

    With ``patient`` the action, e.g. a download, may take longer than the group's timeout; a lost
    rank is still noticed within that timeout.
    """
    if patient and world.size > 1:
        action = _done_on_all(world, action)
    mine = ""
    try:
        result = action()
    except UserError as error:
        mine = str(error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        mine = f"{reason_of(error)}{where}"
    errors = gather_objects(world, mine)
    if any(errors):
        first, message = next((rank, text) for rank, text in enumerate(errors) if text)
        raise UserError(mine or f"rank {first} stopped: {message}")
    return result


def _done_on_all(world: World, action: Callable[[], T]) -> Callable[[], T]:
    """Run ``action`` in a thread until it has ended on every rank.

    Return a function that gives its result or raises its error. Meanwhile the ranks exchange a
    message every second, so that a lost rank is noticed within the group's timeout.
    """
    outcome = in_thread(action)
    pause = _FIRST_PAUSE_SECONDS
    while True:
        wait([outcome], timeout=pause)
        working = torch.tensor([int(not outcome.done())], device=world.device)
        dist.all_reduce(working)
        if not int(working):
            return outcome.result
        pause = min(2 * pause, 1.0)


def run_on_rank0(world: World, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone and return its result, or raise its error, on every rank."""
    return _run_on(world, 0, action)


def _run_on(world: World, source: int, action: Callable[[], T]) -> T:
    """Run ``action`` on rank ``source`` alone and return its picklable result on every rank."""
    shared = [run_on_all_ranks(world, lambda: action() if world.rank == source else None)]
    if world.size > 1:
        dist.broadcast_object_list(shared, src=source)
    return cast("T", shared[0])


def broadcast_checkpoint(world: World, path: str | Path, *, source: int = 0) -> dict[str, Any]:
    """Return a checkpoint's entries on every rank; only rank ``source`` needs the file."""

    def read() -> bytes:
        load_checkpoint(Path(path))  # a damaged file is an error before it is sent
        return Path(path).read_bytes()

    return load_checkpoint(_run_on(world, source, read), name=str(path))


def gather_objects(world: World, mine: T) -> list[T]:
    """Return every rank's object, small and picklable, by rank; a collective call."""
    if world.size == 1:
        return [mine]
    objects: list[Any] = [None] * world.size
    dist.all_gather_object(objects, mine)
    return objects


def warn_of_equal_batches(world: World, inputs: Tensor, labels: Tensor) -> None:
    """Warn if all ranks load the same samples: the most common mistake is a missing sampler.

    inputs, labels : a rank's first batch, tensors of shape (batch, ...) and (batch,).
    """
    if world.size == 1:
        return
    varied = len(labels) >= 8 and len(labels.unique()) > 1  # else equal labels may be a coincidence
    all_ranks = gather_objects(world, (digest(inputs), digest(labels), varied))
    same_inputs, same_labels = (len({one[column] for one in all_ranks}) == 1 for column in (0, 1))
    if len(labels) and (same_inputs or (same_labels and all(one[-1] for one in all_ranks))):
        warnings.warn(
            "all ranks train on the same samples: their first batches are equal. Give each rank "
            "its own share, e.g. with torch.utils.data.DistributedSampler",
            stacklevel=5,
        )
