"""Do all ranks call the same collectives, and do they use their group at all?

Calls are compared up to the shorter of two ranks' lists, each up to its cut. A rank that lacks a
call is at fault only if another one waited for it in vain: rank 0 may well evaluate alone.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, permutations, takewhile
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.where import POINT_TO_POINT, SETUP, recording_exchanges
from lab.audit.recording import RankRecords, Record, Recording, code_line

_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
_PEER_LEFT = re.compile(r"[Cc]onnection (was )?(closed|reset)|Broken pipe|[Tt]imed out")
_LEFT_OPEN = {
    "busy": "was elsewhere when the run had to be ended",
    "gone": "did not end in good order",
}

# A rank's calls, in order: the collectives of each group, the messages to and from each rank.
Queues = Mapping[tuple[Any, ...], list[Record]]


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield ``collectives-differ`` or that they agree, and ``group-unused``."""
    if recording.size < 2 or len(recording.ranks) < 2:
        return
    queues = {rank.rank: _queues(rank) for rank in recording.ranks}
    waits = {rank.rank: _wait(rank, recording.hung) for rank in recording.ranks}
    different = _first_difference(recording, queues) or _in_vain(recording, queues, waits)
    if different is not None:
        yield different
    elif not recording.hung and not any(waits.values()):
        yield from _agreed([queues[rank.rank][()] for rank in recording.ranks])
    if not isinstance(different, Finding) and _is_unused(recording):
        yield _unused(recording)


def _calls(rank: RankRecords) -> list[Record]:
    """Return the calls that this rank began before it was cut; not those of groups of others."""
    records = takewhile(lambda record: record["k"] != "cut", rank.records)
    return [
        one
        for one in records
        if one["k"] == "call" and one.get("size") and one["name"] not in SETUP
    ]


def _queues(rank: RankRecords) -> Queues:
    queues: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for call in _calls(rank):
        queues[_queue(call)].append(call)
    return queues


def _queue(call: Record) -> tuple[Any, ...]:
    """Return what tells a call's queue: () for the group of all ranks, (name, ranks) for others,
    (sends, objects, peer) for messages."""
    if call["name"] in POINT_TO_POINT:
        return "send" in call["name"], "object" in call["name"], call.get("peer")
    group = call.get("group")
    return () if group is None else (str(group[0]), tuple(group[1]))


def _kind(call: Record) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks in one collective."""
    sizes = (call["bytes"], call["dtype"]) if call["name"] in _EQUAL_SIZES else ()
    return call["name"], call.get("op"), call.get("peer"), *sizes


def _first_difference(recording: Recording, queues: Mapping[int, Queues]) -> Finding | None:
    """Return the first collective that one rank calls and another one calls differently.

    Gradients of different steps differ, too: a rank that skips an exchange stays a step ahead.
    """
    for one, other in combinations(recording.ranks, 2):
        counts_steps = one.by_kind["step"] and other.by_kind["step"]
        for queue, calls in queues[one.rank].items():
            ahead = None
            theirs = queues[other.rank].get(queue, []) if len(queue) < 3 else []
            for number, (left, right) in enumerate(zip(calls, theirs, strict=False), start=1):
                now = ahead
                if counts_steps and left["content"] == right["content"] == "gradient":
                    now = right["step"] - left["step"]
                    ahead = now if ahead is None else ahead
                if _kind(left) != _kind(right) or now != ahead:
                    where = f" of the group of ranks {list(queue[1])}" if queue else ""
                    return _differ(
                        "calls",
                        recording,
                        right,
                        number=number,
                        where=where,
                        one=one.rank,
                        left=_describe(left),
                        step=left["step"],
                        other=other.rank,
                        right=_describe(right),
                        other_step=right["step"],
                    )
    return None


def _in_vain(
    recording: Recording, queues: Mapping[int, Queues], waits: Mapping[int, Record | None]
) -> Finding | Unknown | None:
    """Return that a rank waited in vain for another one, if it did."""
    states = {rank.rank: _state(rank, waits[rank.rank], recording.hung) for rank in recording.ranks}
    if len(states) < recording.size or "failed" in states.values():
        return None  # a rank that died explains why others wait
    unsure = None
    for one, other in permutations(states, 2):
        wait, state = waits[one], states[other]
        if wait is None or not _lacks(queues[other], other, queues[one], one, wait):
            continue
        if state == "ended" or (state == "waits" and wait["k"] == "call"):
            return _differ(state, recording, wait, one=one, call=_describe(wait), other=other)
        if state in _LEFT_OPEN:
            stacks = (rank.by_kind["stack"] for rank in recording.ranks if rank.rank == other)
            lines = [f" ({code_line(record['at'])})" for record in next(stacks) if record.get("at")]
            unsure = Unknown(
                f"gradients: rank {one} waited in vain in {_describe(wait)} for rank {other}, "
                f"which {_LEFT_OPEN[state]}{''.join(lines)}"
            )
    return unsure


def _wait(rank: RankRecords, hung: bool) -> Record | None:
    """Return in what a rank waited in vain before its cut: a call, or another record with its line.

    A call may just have begun when a run of ranks that do not stand still is ended.
    """
    last = next(record for record in reversed(rank.records) if record["k"] != "stack")
    stands = last if last["k"] == "stands" else None
    errors = {done["c"]: done.get("error") for done in rank.by_kind["done"]}
    for call in _calls(rank):
        stood = stands is not None and stands["c"] == call["c"]
        if stood or errors.get(call["c"]) or (call["c"] not in errors and not hung):
            return call
    left = [
        one
        for one in rank.by_kind["error"]
        if not one["after_cut"] and _PEER_LEFT.search(one.get("message", ""))
    ]
    return stands or next(iter(left), None)


def _state(rank: RankRecords, wait: Record | None, hung: bool) -> str:
    """Return "cut", "waits", "failed" (of itself), "ended", "busy" or "gone"."""
    failed = rank.by_kind["error"] or any(end.get("status") for end in rank.by_kind["end"])
    states = {
        "cut": rank.by_kind["cut"],
        "waits": wait,
        "failed": failed,
        "ended": rank.by_kind["end"],
        "busy": hung,
    }
    return next((state for state, holds in states.items() if holds), "gone")


def _lacks(theirs: Queues, other: int, mine: Queues, one: int, wait: Record) -> bool:
    """Return whether rank ``other`` takes part in too few calls for ``wait`` to end.

    DistributedDataParallel waits in no call: it lacks any rank that has ended.
    """
    if wait["k"] != "call":
        return True
    queue = _queue(wait)
    number = mine[queue].index(wait)
    if len(queue) < 3:
        return (not queue or other in queue[1]) and len(theirs.get(queue, ())) <= number
    sends, objects, peer = queue
    answers = [(not sends, objects, one), (not sends, objects, None)]  # None: from any rank
    return peer == other and sum(len(theirs.get(each, ())) for each in answers) <= number


def _describe(wait: Record) -> str:
    """Return a call in words, with its line."""
    size = f" of {wait['bytes']:,} bytes" if wait.get("bytes") else ""
    root = f", rank {wait['peer']}" if wait.get("peer") is not None else ""
    at = code_line(wait["at"])
    name = wait.get("name") or "torch.distributed"
    return f"{name}{size}{root}" + ("" if at is None else f" ({at})")


def _differ(kind: str, recording: Recording, wait: Record, **values: Any) -> Finding:
    """Return the finding, with the line at which each rank stood."""
    finding = found("collectives-differ", code_line(wait["at"]), kind=kind, **values)
    stands = (
        f"rank {rank.rank} stands at {code_line(record['at'])}"
        for rank in recording.ranks
        for record in [*rank.by_kind["stack"], *rank.by_kind["stands"]][-1:]
        if record.get("at")
    )
    return replace(finding, evidence=(*finding.evidence, *stands))


def _agreed(lists: list[list[Record]]) -> Iterator[Right]:
    """Yield that the ranks call the same collectives, if they call any."""
    steps = Counter(call["step"] for call in min(lists, key=len))
    if steps:
        whole = {steps[step] for step in range(1, max(steps))}  # the first and last are not whole
        number = f", {whole.pop()} a step" if len(whole) == 1 and 0 not in whole else ""
        yield Right(
            f"all ranks call the same collectives in the same order in the watched steps{number}"
        )


def _is_unused(recording: Recording) -> bool:
    """Return whether nothing but barriers and rare objects is exchanged, by any known means."""
    if len(recording.ranks) < recording.size or recording_exchanges(recording):
        return False
    return all(
        (_is_one_of_several(rank) and len(rank.by_kind["step"]) > 1)
        and all(_steps_with_its_own(rank, step) for step in rank.by_kind["step"])
        for rank in recording.ranks
    )


def _is_one_of_several(rank: RankRecords) -> bool:
    """Return whether a rank has joined others, or was started as one of several and has not."""
    if groups := rank.by_kind["group"]:
        return any(group["world"] > 1 for group in groups)
    return any(start.get("hint") is not None for start in rank.by_kind["start"])


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
    calls = Counter(call["name"] for call in recording.ranks[0].by_kind["call"])
    listed = (f"{name} {number} times" for name, number in calls.items() if name not in SETUP)
    ended = not any(rank.by_kind["cut"] for rank in recording.ranks)
    return found(
        "group-unused",
        code_line(groups[0]["at"]) if groups else None,
        kind="group" if groups else "alone",
        sure=ended,
        steps=steps,
        ranks=recording.size,
        calls=", ".join(listed) or "none",
        more="" if ended else "; a script that exchanges weights more rarely looks the same",
    )
