"""Collectives other than gradient sync: compare settings, run an action on all ranks, gather objects, broadcast bytes."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.process_group import World
from common.errors import UserError
from common.utils.processes import in_thread

T = TypeVar("T")
_FIRST_PAUSE_SECONDS = 0.02


def check_same_on_all_ranks(world: World, facts: Mapping[str, Any], *, what: str) -> None:
    """Raise UserError on every rank, naming each fact that differs with the values and who has them.

    One all_reduce of 64 bytes where all agree, whatever the number of ranks. ``facts`` are plain values by name, e.g. settings
    or tensor shapes.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(world.device)
    # The largest of all complements is the complement of the smallest.
    largest = torch.stack([mine, ~mine])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if torch.equal(largest[0], ~largest[1]):  # the same verdict on every rank
        return
    all_facts = gather_objects(world, dict(facts))
    names = list(dict.fromkeys(name for one in all_facts for name in one))
    values = {name: [one.get(name, "absent") for one in all_facts] for name in names}
    lines = [
        f"{name}: {_by_value(of_ranks)}"
        for name, of_ranks in values.items()
        if any(value != of_ranks[0] for value in of_ranks)
    ]
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(
        f"the ranks differ in {what}. {'; '.join(lines[:5])}{more}. Start every rank with the same"
    )


def _by_value(values: list[Any]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(str(value), []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        f"{' …' if len(ranks) > 8 else ''}"
        for value, ranks in ranks_by_value.items()
    )


def run_on_all_ranks(world: World, action: Callable[[], T], *, patient: bool = False) -> T:
    """Run ``action`` on every rank; if it fails with UserError or OSError on one, raise UserError on all.

    ``patient`` waits for as long as the action takes (a download), provided that every rank answers within the group's timeout.
    """
    if world.size == 1:
        return _with_user_errors(action)
    if patient:
        action = _done_on_all(world, action)
    error: str | None = None
    try:
        result = _with_user_errors(action)
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
    """Run ``action`` in a thread until it has ended on every rank; return a function that gives its result or raises its error.

    Meanwhile the ranks exchange a message every second, so that a lost rank is noticed within the group's timeout.
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
    """Run ``action`` on rank 0 alone and return its result (small and picklable) or raise its UserError on every rank."""
    if world.size == 1:
        return _with_user_errors(action)
    shared: list[Any] = [None, None]
    if world.is_rank0:
        try:
            shared[0] = _with_user_errors(action)
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
    """Run ``read`` on rank ``source`` and return its bytes on every rank; a UserError or OSError there is raised on all."""
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


def _with_user_errors(action: Callable[[], T]) -> T:
    """Return what ``action`` returns; raise its OSError as a UserError."""
    try:
        return action()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{error.strerror or error}{where}") from error


def warn_of_equal_batches(world: World, inputs: Tensor, labels: Tensor) -> None:
    """Warn if all ranks load the same samples: without a sampler they do, the commonest mistake of all. Collective."""
    if world.size == 1:
        return
    digests = [
        hashlib.sha256(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        ).hexdigest()
        for tensor in (inputs, labels)
    ]
    varied = len(labels) >= 8 and len(labels.unique()) > 1  # else equal labels may be chance
    all_ranks = gather_objects(world, (*digests, varied))
    same_inputs, same_labels = (len({one[column] for one in all_ranks}) == 1 for column in (0, 1))
    if len(labels) and (same_inputs or (same_labels and all(one[-1] for one in all_ranks))):
        warnings.warn(
            "all ranks train on the same samples: their first batches are equal. Give each rank a share of its "
            "own, e.g. by torch.utils.data.DistributedSampler",
            stacklevel=5,
        )
