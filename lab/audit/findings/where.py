"""Facts about a recording that several checks ask for: DDP, exchanges, lines of the script."""

import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from lab.audit.recording import CodeLine, Record, Recording, code_line

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list")
SETUP = ("init_process_group", "new_group")
_NO_EXCHANGE = ("barrier", "object", "monitored", *SETUP)


def by_rank(recording: Recording, kind: str, step: int | None = None) -> list[list[Record]]:
    """Return each rank's records of a kind, only those of a step if it is given."""
    return [
        [one for one in rank.by_kind[kind] if step in (None, one.get("step"))]
        for rank in recording.ranks
    ]


def uses_ddp(recording: Recording) -> bool:
    """Return whether the ranks built DistributedDataParallel or FSDP."""
    return any(rank.by_kind["ddp"] or rank.by_kind["fsdp"] for rank in recording.ranks)


def bypasses_ddp(recording: Recording) -> bool:
    """Return whether every training forward runs a module that DDP wraps, but not through DDP."""
    backwards = chain.from_iterable(by_rank(recording, "backward"))
    through = {forward[2] for one in backwards for forward in one.get("forwards") or ()}
    return through == {"bypass"} and all(by_rank(recording, "ddp"))


def exchanges(recording: Recording, step: int, content: str | None = None) -> list[Record]:
    """Return the calls that exchange tensors by hand in a step; of a content if it is given."""
    return [
        one
        for one in chain.from_iterable(by_rank(recording, "call", step))
        if content in (None, one.get("content"))
        and not any(word in one["name"] for word in _NO_EXCHANGE)
    ]


def recording_exchanges(recording: Recording) -> bool:
    """Return whether the ranks exchange anything but barriers and an object at the start.

    Without any exchange ``group-unused`` says what is wrong, see collectives.py.
    """
    rows = by_rank(recording, "call")
    calls = [one for row in rows for one in row if one["name"] not in SETUP]
    tensors = any("size" not in one or one.get("bytes") for one in calls)
    objects = [{one.get("step") for one in row if "object" in one["name"]} for row in rows]
    unseen = uses_ddp(recording) or any(by_rank(recording, "mesh"))
    return unseen or tensors or any(len(steps) > 1 for steps in objects)


def first_step_apart(recording: Recording) -> int:
    """Return the first step in which a rank is in another epoch than the others.

    From there on steps of equal numbers do not belong together, as within torch's ``Join``.
    """
    epochs: dict[tuple[int, int], set[int]] = defaultdict(set)  # by optimiser and step
    for rank in recording.ranks:
        begun = [one["t"] for one in rank.by_kind["trained"]]
        for one in rank.by_kind["step"] if begun else ():  # other ranks may send it its data
            epochs[one["o"], one["step"]].add(bisect(begun, one["t"]))
    return min((step for (_, step), one in epochs.items() if len(one) > 1), default=sys.maxsize)


def lasting_optimizers(recording: Recording) -> list[list[int]]:
    """Return the optimisers that train the model, by number; together if they share a tensor.

    Others come and go with tensors that are thrown away: copies of the model for one task, or
    inputs that an adversary changes. If there are only such ones, each of them counts; if none has
    done a step, as in a script that failed early, all count.
    """
    rank = max(recording.ranks, key=lambda one: len(one.by_kind["step"]))
    built, tensor = {}, {}
    for one in reversed(rank.by_kind["params"]):
        built[one["o"]], tensor[one["o"]] = one["built"], min(row[-1] for row in one["rows"])
    steps = defaultdict(list)  # by the first tensor, which an optimiser built anew shares
    for one in rank.by_kind["step"]:
        steps[tensor.get(one["o"])].append(one)
    kept = [
        mine
        for mine in steps.values()
        if not any(
            other[0]["t"] > mine[-1]["t"] and len(other) >= len(mine) for other in steps.values()
        )
    ]
    families = [sorted({one["o"] for one in mine}) for mine in kept or steps.values()] or [
        [o] for o in sorted(built)
    ]
    return [one for one in families if not min(built.get(o, 0) for o in one)] or families


def exchange_line(recording: Recording, step: int) -> CodeLine | None:
    """Return the line that exchanges gradients in a step, else one that exchanges anything."""
    return first_line([*exchanges(recording, step, "gradient"), *exchanges(recording, step)])


def backward_line(recording: Recording) -> CodeLine | None:
    """Return the line of the first backward."""
    return first_line(chain.from_iterable(by_rank(recording, "backward")))


def first_line(records: Iterable[Record]) -> CodeLine | None:
    """Return the line of the first record that has one."""
    return next((code_line(one["at"]) for one in records if one.get("at")), None)


def ends_without_sync(recording: Recording, step: int) -> bool:
    """Return whether DDP averages in some backward of a step, but not in the last, on all ranks."""
    rows = by_rank(recording, "backward", step)
    synced = [[one.get("synced") for one in row] for row in rows]
    return all(True in row and row[-1] is False for row in synced)


def unawaited(recording: Recording, step: int) -> int:
    """Return how many asynchronous exchanges of gradients rank 0 never waits for in a step."""
    done, calls = by_rank(recording, "done")[0], by_rank(recording, "call", step)[0]
    waited = {one["c"] for one in done if one.get("wait_seconds") is not None}
    lost = [one for one in calls if one.get("async") and one["c"] not in waited]
    return sum(one.get("content") == "gradient" for one in lost)


def samples_of(backward: Record) -> int:
    """Return on how many samples a backward trained; 0 if that is not known."""
    in_loss = (backward.get("loss") or {}).get("samples")
    return int(in_loss or sum(row[0] or 0 for row in backward.get("forwards") or ()))


def local_samples(recording: Recording, step: int) -> list[int]:
    """Return by rank how many samples it trained on in a step; 0 where that is not known."""
    counts = (list(map(samples_of, row)) for row in by_rank(recording, "backward", step))
    return [sum(row) if all(row) else 0 for row in counts]
