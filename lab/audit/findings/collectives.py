"""Do all ranks call the same collectives, and do they use their group at all?

Calls are compared up to the shorter of two ranks' lists, each up to its cut. A rank that lacks a
call is at fault only if another one waited for it in vain: rank 0 may well evaluate alone.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.where import POINT_TO_POINT
from lab.audit.recording import RankRecords, Record, Recording, code_line

_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
_SETUP = ("init_process_group", "new_group")
_MOST_CALLS = 20_000
"""A longer list may be incomplete, see probe/collectives.py."""
_COMMUNICATING = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/")
"""Where Python stands while DistributedDataParallel communicates in C++."""
_IDLE = 0.2
"""A process that uses less of a core than this waits for something."""

Group = tuple[str, tuple[int, ...]] | None


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield ``collectives-differ`` or that they agree, and ``group-unused``."""
    if recording.size < 2 or len(recording.ranks) < 2:
        return
    different = _first_difference(recording) or _missing(recording)
    if different is not None:
        yield different
    elif (agreed := _agreed(recording)) is not None:
        yield agreed
    if not isinstance(different, Finding) and _is_unused(recording):
        yield _unused(recording)


def _until_cut(rank: RankRecords) -> list[Record]:
    """Return the calls that this rank began before it was cut; not those of groups of others."""
    calls = []
    for record in rank.records:
        if record["k"] == "cut":
            break
        if record["k"] == "call" and record.get("size") and record["name"] not in _SETUP:
            calls.append(record)
    return calls


def _by_group(rank: RankRecords) -> dict[Group, list[Record]]:
    """Return the collectives of each group, in order; None is the group of all ranks."""
    found: dict[Group, list[Record]] = defaultdict(list)
    for call in _until_cut(rank):
        if call["name"] not in POINT_TO_POINT:
            group = call.get("group")
            found[None if group is None else (str(group[0]), tuple(group[1]))].append(call)
    return found


def _kind(call: Record) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks in one collective."""
    sizes = (call["bytes"], call["dtype"]) if call["name"] in _EQUAL_SIZES else ()
    return call["name"], call.get("op"), call.get("peer"), *sizes


def _first_difference(recording: Recording) -> Finding | None:
    """Return the first call, of any two ranks, that another one calls differently."""
    calls = {rank.rank: _by_group(rank) for rank in recording.ranks}
    for one, other in combinations(recording.ranks, 2):
        for group in calls[one.rank].keys() & calls[other.rank].keys():
            pairs = list(zip(calls[one.rank][group], calls[other.rank][group], strict=False))
            ahead = _ahead(pairs) if one.by_kind["step"] and other.by_kind["step"] else None
            for number, (left, right) in enumerate(pairs, start=1):
                shifted = ahead is not None and _ahead([(left, right)], ahead) != ahead
                if _kind(left) != _kind(right) or shifted:
                    where = "" if group is None else f" of the group of ranks {list(group[1])}"
                    observed = (
                        f"collective {number}{where}: "
                        f"rank {one.rank} calls {_describe(left)} in step {left['step']}; "
                        f"rank {other.rank} calls {_describe(right)} in step {right['step']}"
                    )
                    return _finding(observed, recording, right)
    return None


def _ahead(pairs: list[tuple[Record, Record]], otherwise: int = 0) -> int:
    """Return by how many steps the second rank is ahead where both first exchange gradients."""
    steps = (
        right["step"] - left["step"]
        for left, right in pairs
        if left["content"] == right["content"] == "gradient"
    )
    return next(steps, otherwise)


def _missing(recording: Recording) -> Finding | Unknown | None:
    """Return that a rank waited in vain for another one, if it did."""
    states = {rank.rank: _state(rank, recording) for rank in recording.ranks}
    if len(states) < recording.size or {"failed", "unknown"} & set(states.values()):
        return None  # a rank that died explains why others wait
    if any(len(_until_cut(rank)) > _MOST_CALLS for rank in recording.ranks):
        return None
    unsure = None
    for waiting, other in permutations(recording.ranks, 2):
        call = _stuck(waiting)
        if call is None or not _lacks(waiting, other, call):
            continue
        state = states[other.rank]
        observed = f"rank {waiting.rank} waits in {_describe(call)}"
        if state in ("ended", "waits"):
            does = "ends without it" if state == "ended" else "waits elsewhere"
            return _finding(f"{observed}; rank {other.rank} {does}", recording, call)
        if state == "busy":
            unsure = Unknown(
                f"whether the ranks call the same collectives: {observed}, "
                f"while rank {other.rank} was still busy when the run was ended"
            )
    return unsure


def _stuck(rank: RankRecords) -> Record | None:
    """Return the call before the cut that never returned, or failed; None if there is none."""
    returned = {done["c"] for done in rank.by_kind["done"] if not done.get("error")}
    failed = {done["c"] for done in rank.by_kind["done"] if done.get("error")}
    for call in _until_cut(rank):
        if call["c"] in failed or call["c"] not in returned:
            return call
    return None


def _lacks(waiting: RankRecords, other: RankRecords, call: Record) -> bool:
    """Return whether ``other`` takes part in fewer such calls than ``waiting``."""
    if call["name"] in POINT_TO_POINT:
        return call.get("peer") == other.rank and _messages(other, waiting, call) < _messages(
            waiting, other, call, same=True
        )
    for group, calls in _by_group(waiting).items():
        if any(one is call for one in calls) and (group is None or other.rank in group[1]):
            number = next(index for index, one in enumerate(calls) if one is call)
            return len(_by_group(other)[group]) <= number
    return False


def _messages(rank: RankRecords, peer: RankRecords, call: Record, same: bool = False) -> int:
    """Return how many messages like ``call``, or answering it, a rank exchanged with its peer."""
    sends = ("send" in call["name"]) == same
    objects = "object" in call["name"]
    return sum(
        one["name"] in POINT_TO_POINT
        and ("send" in one["name"]) == sends
        and ("object" in one["name"]) == objects
        and (one.get("peer") == peer.rank or one.get("peer") is None)
        for one in _until_cut(rank)
    )


def _state(rank: RankRecords, recording: Recording) -> str:
    """Return "cut", "failed" (of itself), "ended", "waits", "busy" or "unknown"."""
    if rank.by_kind["cut"]:
        return "cut"
    stuck = _stuck(rank)
    if rank.by_kind["error"] and stuck is None:
        return "failed"
    if stuck is not None:
        return "waits"
    if ends := rank.by_kind["end"]:
        return "failed" if ends[-1].get("status") else "ended"
    if not recording.hung or not (stacks := rank.by_kind["stack"]):
        return "unknown"
    innermost = [frames[-1][0] for _, frames in stacks[-1]["threads"] if frames]
    communicates = any(part in name for name in innermost for part in _COMMUNICATING)
    return "waits" if communicates and stacks[-1].get("busy", 1.0) < _IDLE else "busy"


def _describe(call: Record) -> str:
    """Return a call in words, with its line."""
    size = f" of {call['bytes']:,} bytes" if call.get("bytes") else ""
    root = f", rank {call['peer']}" if call.get("peer") is not None else ""
    at = code_line(call["at"])
    return f"{call['name']}{size}{root}" + ("" if at is None else f" ({at})")


def _finding(observed: str, recording: Recording, call: Record) -> Finding:
    """Return the finding with where each rank stood."""
    stacks = []
    for rank in recording.ranks:
        for record in rank.by_kind["stack"][-1:]:
            threads = [frames for _, frames in record["threads"]]
            frames = max(threads, key=len, default=())
            lines = [f"{name}:{line} in {function}" for name, line, function, _ in frames]
            stacks.append(f"rank {rank.rank} was at {' > '.join(lines)}")
    return Finding("collectives-differ", (observed, *stacks), code_line(call["at"]))


def _agreed(recording: Recording) -> Right | None:
    """Return that the ranks call the same collectives, if they call any."""
    lists = [_by_group(rank)[None] for rank in recording.ranks]
    shortest = min(lists, key=len)
    if not shortest or _stuck_anywhere(recording):
        return None
    steps = Counter(call["step"] for call in shortest)
    whole = {steps[step] for step in range(1, max(steps))}  # the first and the last are not whole
    number = f", {whole.pop()} a step" if len(whole) == 1 and 0 not in whole else ""
    return Right(f"all ranks call the same collectives in the same order{number}")


def _stuck_anywhere(recording: Recording) -> bool:
    return any(_stuck(rank) is not None for rank in recording.ranks)


def _is_unused(recording: Recording) -> bool:
    """Return whether nothing but barriers and rare objects is exchanged, by any known means."""
    for rank in recording.ranks:
        kinds = rank.by_kind
        if any(kinds[kind] for kind in ("ddp", "fsdp", "mesh")) or len(kinds["step"]) < 2:
            return False
        if not any(group["world"] > 1 for group in kinds["group"]) and not _started_as_rank(rank):
            return False
        calls = [call for call in kinds["call"] if call["name"] not in _SETUP]
        objects = {call["step"] for call in calls if "object" in call["name"]}
        if any("size" not in call or call["bytes"] for call in calls) or len(objects) > 1:
            return False
        if not all(_steps_with_its_own(rank, step) for step in kinds["step"]):
            return False
    return len(recording.ranks) == recording.size


def _started_as_rank(rank: RankRecords) -> bool:
    """Return whether the command named this process's rank, but the process joined no group."""
    named = any(start.get("hint") is not None for start in rank.by_kind["start"])
    return named and not rank.by_kind["group"]


def _steps_with_its_own(rank: RankRecords, step: Record) -> bool:
    """Return whether what the optimiser gets is this rank's own gradient, or a multiple of it."""
    own, got = rank.numbers(step["own"]), rank.numbers(step["got"])
    if own is None or got is None or own.shape != got.shape:
        return False
    product = np.linalg.norm(own) * np.linalg.norm(got)
    return bool(own @ got > (1 - 1e-4) * product)


def _unused(recording: Recording) -> Finding:
    steps = min(len(rank.by_kind["step"]) for rank in recording.ranks)
    groups = recording.ranks[0].by_kind["group"]
    line = code_line(groups[0]["at"]) if groups else None
    calls = Counter(call["name"] for call in recording.ranks[0].by_kind["call"])
    others = {name: number for name, number in calls.items() if name not in _SETUP}
    called = ", ".join(f"{name} {number} times" for name, number in others.items()) or "none"
    made = "" if groups else "no process group is made; "
    observed = (
        f"{made}in {steps} steps of {recording.size} ranks no tensor was exchanged"
        f" (calls: {called})",
        "no optimiser gets anything from another rank",
    )
    if not any(rank.by_kind["cut"] for rank in recording.ranks):
        return Finding("group-unused", observed, line)
    rarely = f"a script that exchanges weights only after more than {steps} steps looks the same"
    return Finding("group-unused", (*observed, rarely), line, "likely")
