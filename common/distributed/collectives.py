"""What ranks do together beside gradients: compare settings, run an action on all, gather and broadcast objects."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.process_group import (
    World,
)
from common.errors import UserError
from common.utils.processes import in_thread

T = TypeVar("T")
_FIRST_PAUSE_SECONDS = 0.02


def check_same_on_all_ranks(world: World, facts: Mapping[str, Any], *, what: str) -> None:
    """Raise UserError on every rank, naming each fact that differs with the values and who has them.

    One all_reduce of 64 bytes where all agree, however many they are. ``facts`` are plain values by name, e.g. settings or
    tensor shapes.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(world.device)
    largest = torch.stack(
        [mine, ~mine]
    )  # the largest of all complements is the complement of the smallest
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if torch.equal(largest[0], ~largest[1]):  # the same verdict on every rank
        return
    all_facts = gather_objects(world, dict(facts))
    names = list(dict.fromkeys(name for one in all_facts for name in one))
    lines = [
        f"{name}: {_by_value([one.get(name, 'absent') for one in all_facts])}"
        for name in names
        if any(one.get(name, "absent") != all_facts[0].get(name, "absent") for one in all_facts)
    ]
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(
        f"the ranks differ in {what}. {'; '.join(lines[:5])}{more}. Start every rank with the same"
    )


def _by_value(values: list[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who[:8]))}"
        f"{' …' if len(who) > 8 else ''}"
        for value, who in ranks.items()
    )


def run_on_all_ranks(world: World, action: Callable[[], T], *, patient: bool = False) -> T:
    """Run ``action`` on every rank; if it fails with UserError or OSError on one, raise UserError on all.

    ``patient`` waits for as long as the action takes (a download), provided that every rank answers within the group's timeout.
    """
    if world.size == 1:
        return _told(action)
    if patient:
        action = _done_on_all(world, action)
    error: str | None = None
    try:
        result = _told(action)
    except UserError as failure:
        error = str(failure)
    failures = torch.tensor([int(error is not None)], device=world.device)
    dist.all_reduce(failures)
    if int(failures):
        errors = gather_objects(world, error)
        rank = world.rank if error else next(r for r, text in enumerate(errors) if text)
        raise UserError(
            errors[rank] if rank == world.rank else f"rank {rank} stopped: {errors[rank]}"
        )
    return result


def _done_on_all(world: World, action: Callable[[], T]) -> Callable[[], T]:
    """Run ``action`` in a thread until it has ended on every rank, and return what gives its result or raises its error.

    Meanwhile the ranks ask each other every second, so that one that is lost is missed within the group's timeout.
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
    """Run ``action`` on rank 0 alone and give its result (a small, picklable one) or its error to every rank."""
    if world.size == 1:
        return _told(action)
    shared: list[Any] = [None, None]
    if world.is_rank0:
        try:
            shared[0] = _told(action)
        except UserError as failure:
            shared[1] = str(failure)
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise UserError(shared[1] if world.is_rank0 else f"rank 0 stopped: {shared[1]}")
    return shared[0]


def gather_objects(world: World, mine: T) -> list[T]:
    """Return every rank's object (small and picklable), by rank, on every rank."""
    if world.size == 1:
        return [mine]
    objects: list[Any] = [None] * world.size
    dist.all_gather_object(objects, mine)
    return objects


def broadcast_bytes(world: World, read: Callable[[], bytes], *, source: int = 0) -> bytes:
    """Run ``read`` on rank ``source`` and return its bytes on every rank; its UserError or OSError reaches all of them."""
    content = run_on_all_ranks(world, lambda: read() if world.rank == source else b"")
    if world.size == 1:
        return content
    length = torch.tensor([len(content)], dtype=torch.int64, device=world.device)
    dist.broadcast(length, src=source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if world.rank == source:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    buffer = buffer.to(world.device)
    dist.broadcast(buffer, src=source)
    return content if world.rank == source else buffer.cpu().numpy().tobytes()


def _told(action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{error.strerror or error}{where}") from error


def warn_of_equal_batches(world: World, inputs: Tensor, labels: Tensor) -> None:
    """Warn of the commonest mistake of all: no sampler, so that all ranks train on the same samples. Collective."""
    if world.size == 1:
        return
    mine = [
        hashlib.sha256(
            t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        ).hexdigest()
        for t in (inputs, labels)
    ]
    others = gather_objects(world, (*mine, len(labels) >= 8 and len(labels.unique()) > 1))
    same_inputs, same_labels = (len({other[column] for other in others}) == 1 for column in (0, 1))
    if len(labels) and (same_inputs or (same_labels and all(telling for *_, telling in others))):
        warnings.warn(
            "all ranks train on the same samples: their first batches are equal. Give each rank a share of its "
            "own, e.g. by torch.utils.data.DistributedSampler",
            stacklevel=5,
        )
