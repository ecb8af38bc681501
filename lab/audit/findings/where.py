"""Facts about a recording that several checks ask for: DDP, exchanges, lines of the script."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from math import prod

from lab.audit.findings.samples.epochs import trained_epochs
from lab.audit.recording import CodeLine, RankRecords, Record, Recording, code_line

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list")
_SETUP = ("init_process_group", "new_group")
_NO_EXCHANGE = ("barrier", "object", "monitored", *_SETUP)


def uses_ddp(recording: Recording) -> bool:
    """Return whether the ranks built DistributedDataParallel or FSDP."""
    return any(rank.by_kind["ddp"] or rank.by_kind["fsdp"] for rank in recording.ranks)


def bypasses_ddp(recording: Recording) -> bool:
    """Return whether every training forward runs a module that DDP wraps, but not through DDP."""
    through = [
        forward[2]
        for rank in recording.ranks
        for backward in rank.by_kind["backward"]
        for forward in backward.get("forwards") or ()
    ]
    built = all(rank.by_kind["ddp"] for rank in recording.ranks)
    return built and bool(through) and all(one == "bypass" for one in through)


def exchanges(recording: Recording, step: int, content: str | None = None) -> bool:
    """Return whether a rank exchanged tensors by hand in a step; of a content if it is given."""
    return any(True for _ in _calls(recording, step, content))


def _calls(recording: Recording, step: int, content: str | None) -> Iterator[Record]:
    for rank in recording.ranks:
        for one in rank.by_kind["call"]:
            if one.get("step") != step or any(word in one["name"] for word in _NO_EXCHANGE):
                continue
            if content is None or one.get("content") == content:
                yield one


def recording_exchanges(recording: Recording) -> bool:
    """Return whether the ranks exchange anything but barriers and an object at the start.

    Without any exchange ``group-unused`` says what is wrong, see collectives.py.
    """
    for rank in recording.ranks:
        calls = [one for one in rank.by_kind["call"] if one["name"] not in _SETUP]
        objects = {one.get("step") for one in calls if "object" in one["name"]}
        if any("size" not in one or one.get("bytes") for one in calls) or len(objects) > 1:
            return True
    return uses_ddp(recording) or any(rank.by_kind["mesh"] for rank in recording.ranks)


def first_step_apart(recording: Recording) -> int:
    """Return the first step in which a rank is in another epoch than the others.

    From there on steps of equal numbers do not belong together, as within torch's ``Join``.
    """
    ranks = [_epochs_of_steps(rank) for rank in recording.ranks]
    if all(trained_epochs(rank) for rank in recording.ranks):
        for step, epochs in enumerate(zip(*ranks, strict=False)):
            if len(set(epochs)) > 1:
                return step
    return sys.maxsize


def _epochs_of_steps(rank: RankRecords) -> list[int]:
    """Return by step how many training epochs have ended before it."""
    trained, ended = trained_epochs(rank), 0
    found: list[int] = []
    for record in rank.records:
        if record["k"] == "epoch":
            ended += (record["l"], record["epoch"]) in trained and not record["cut"]
        elif record["k"] == "step" and record["step"] == len(found):
            found.append(ended)
    return found


def is_one_model(recording: Recording) -> bool:
    """Return whether the ranks compute one model together, by exchanging activations.

    They do so within the forward pass, by all_to_all or all_gather within backward, or between
    ranks that train different parameters. FSDP gathers weights in forward; DDP within Join sends a
    single number.
    """
    if any(rank.by_kind["fsdp"] for rank in recording.ranks):
        return False
    calls = [
        one
        for rank in recording.ranks
        for one in rank.by_kind["call"]
        if one.get("content") == "other" and prod(one.get("shape") or ()) > 1
    ]
    rows = [
        sorted([row[1:3] for one in rank.by_kind["params"] for row in one["rows"]])
        for rank in recording.ranks
    ]
    if any(one != rows[0] for one in rows) and any(one["name"] in POINT_TO_POINT for one in calls):
        return True
    within = [(one.get("within"), one["name"]) for one in calls]
    return any(
        place == "forward" or (place and name.startswith(("all_to_all", "all_gather")))
        for place, name in within
    )


def lasting_optimizers(recording: Recording) -> list[list[int]]:
    """Return the optimisers that train the model, by number; together if they share a tensor.

    Others come and go with tensors that are thrown away: copies of the model for one task, or
    inputs that an adversary changes. If there are only such ones, each of them counts.
    """
    rank = max(recording.ranks, key=lambda one: len(one.by_kind["step"]))
    steps: dict[int, list[float]] = defaultdict(list)
    for one in rank.by_kind["step"]:
        steps[one["o"]].append(one["t"])
    built = {one["o"]: one.get("built", 0) for one in reversed(rank.by_kind["params"])}
    families: list[tuple[set[int], list[int]]] = []
    for o in sorted(steps):
        tensors, family = _tensors_of(rank, o), [o]
        for known in [one for one in families if one[0] & tensors]:
            families.remove(known)
            tensors, family = tensors | known[0], [*known[1], *family]
        families.append((tensors, family))
    times = [sorted(time for o in family for time in steps[o]) for _, family in families]
    kept = [
        family
        for (_, family), mine in zip(families, times, strict=True)
        if not any(other[0] > mine[-1] and len(other) >= len(mine) for other in times)
    ]
    kept = kept or [family for _, family in families]
    return [one for one in kept if not min(built.get(o, 0) for o in one)] or kept


def _tensors_of(rank: RankRecords, o: int) -> set[int]:
    rows = (row for one in rank.by_kind["params"] if one["o"] == o for row in one["rows"])
    return {row[7] for row in rows if len(row) > 7}


def exchange_line(recording: Recording, step: int) -> CodeLine | None:
    """Return the line that exchanges gradients in a step, else one that exchanges anything."""
    for content in ("gradient", None):
        for one in _calls(recording, step, content):
            if one.get("at"):
                return code_line(one["at"])
    return None


def backward_line(recording: Recording) -> CodeLine | None:
    """Return the line of the first backward."""
    for rank in recording.ranks:
        for one in rank.by_kind["backward"]:
            if one.get("at"):
                return code_line(one["at"])
    return None


def ends_without_sync(recording: Recording, step: int) -> bool:
    """Return whether DDP averages in some backward of a step, but not in the last, on all ranks."""
    for rank in recording.ranks:
        synced = [one.get("synced") for one in rank.by_kind["backward"] if one["step"] == step]
        if True not in synced or synced[-1] is not False:
            return False
    return True


def unawaited(recording: Recording, step: int) -> int:
    """Return how many asynchronous exchanges of gradients rank 0 never waits for in a step."""
    rank = recording.ranks[0]
    waited = {one["c"] for one in rank.by_kind["done"] if one.get("wait_seconds") is not None}
    return sum(
        bool(one.get("async")) and one.get("content") == "gradient" and one["c"] not in waited
        for one in rank.by_kind["call"]
        if one.get("step") == step
    )


def samples_of(backward: Record) -> int:
    """Return on how many samples a backward trained; 0 if that is not known."""
    loss = backward.get("loss") or {}
    return int(loss.get("samples") or sum(row[0] or 0 for row in backward.get("forwards") or ()))


def local_samples(recording: Recording, step: int) -> list[int] | None:
    """Return by rank how many samples it trained on in a step; None if that is not known."""
    found = []
    for rank in recording.ranks:
        counts = [samples_of(one) for one in rank.by_kind["backward"] if one["step"] == step]
        if not counts or not all(counts):
            return None
        found.append(int(sum(counts)))
    return found
