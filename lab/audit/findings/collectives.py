"""Do all ranks call the same collectives, and do they use their group at all?

Calls are compared up to the shorter of two ranks' lists, each up to its cut. A rank that lacks a
call is at fault only if another one waited for it in vain: rank 0 may well evaluate alone.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, takewhile
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found, gravest
from lab.audit.findings.where import POINT_TO_POINT, SETUP, recording_exchanges
from lab.audit.recording import RankRecords, Record, Recording, code_line

_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
_PEER_LEFT = re.compile(r"[Cc]onnection (was )?(closed|reset)|Broken pipe|[Tt]imed out")
_LEFT_OPEN = {
    "busy": "was elsewhere when the run had to be ended",
    "gone": "did not end in good order",
}


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield ``collectives-differ`` or that they agree, and ``group-unused``."""
    if recording.size < 2 or len(recording.ranks) < 2:
        return
    ranks = [_Rank(one, recording.hung) for one in recording.ranks]
    states = {one.state for one in ranks}
    outcomes: list[Outcome] = [*_differences(ranks)]
    if len(ranks) == recording.size and "failed" not in states:  # else a death explains it
        outcomes += _in_vain(ranks)
    different = gravest(outcomes)
    if isinstance(different, Finding):
        stands = [line for one in ranks for line in one.stands]
        yield replace(different, evidence=(*different.evidence, *stands))
    elif different is not None:
        yield different
    elif not recording.hung and "waits" not in states:
        yield from _agreed([one.queues["", ()] for one in ranks])
    if len(ranks) == recording.size and not recording_exchanges(recording):
        yield from _unused(recording)


class _Rank:
    """What a rank called before its cut, and where it was seen last.

    Attributes
    ----------
    queues : its calls, in order, by the name and the ranks of their group: ("", ()) for that of all
        ranks. Those of messages have their sender, None if it may be any rank, and receiver.
    stands : at which line it stood, in a sentence, if that is known.
    state : "cut", "waits", "failed" (of itself), "ended", "busy" or "gone".
    wait : in what it waits in vain: a call, or another record with its line. A call may just have
        begun when a run of ranks that do not stand still is ended.
    """

    def __init__(self, records: RankRecords, hung: bool) -> None:
        self.number = records.rank
        self.by_kind = kinds = records.by_kind
        self.queues: dict[Any, list[Record]] = defaultdict(list)
        before = takewhile(lambda record: record["k"] != "cut", records.records)
        calls = [
            one
            for one in before
            if one["k"] == "call" and one.get("size") and one["name"] not in SETUP
        ]
        for call in calls:
            self.queues[self.queue(call)].append(call)
        lines = [one["at"] for one in kinds["stack"] + kinds["stands"] if one.get("at")]
        self.stands = [f"rank {self.number} stands at {code_line(at)}" for at in lines[-1:]]
        last = next(one for one in reversed(records.records) if one["k"] != "stack")
        stands = [last] if last["k"] == "stands" else []
        errors = {one["c"]: one.get("error") for one in kinds["done"]}
        errors |= {one["c"]: "stands" for one in stands}
        waits = [one for one in calls if errors.get(one["c"], not hung)] + stands
        waits += [one for one in kinds["error"] if _PEER_LEFT.search(one.get("message", ""))]
        self.wait = waits[0] if waits else {}
        states = {
            "cut": kinds["cut"],
            "waits": waits,
            "failed": kinds["error"] or any(one.get("status") for one in kinds["end"]),
            "ended": kinds["end"],
            "busy": hung,
        }
        self.state = next((state for state, holds in states.items() if holds), "gone")

    def queue(self, call: Record) -> tuple[str, tuple[Any, ...]]:
        """Return what tells the queue of a call."""
        if call["name"] not in POINT_TO_POINT:
            name, ranks = call.get("group") or ("", ())
            return str(name), tuple(ranks)
        ends = (self.number, call.get("peer"))
        what = "objects" if "object" in call["name"] else "tensors"
        return what, ends if "send" in call["name"] else ends[::-1]

    def lacks(self, other: "_Rank") -> bool:
        """Return whether the other one takes part in too few calls for this wait to end.

        DistributedDataParallel waits in no call: it lacks any rank that has ended.
        """
        if self.wait["k"] != "call":
            return True
        name, ranks = queue = self.queue(self.wait)
        answers = other.queues[queue] + other.queues[name, (None, *ranks[1:])]
        member = not ranks or other.number in ranks
        return member and len(answers) <= self.queues[queue].index(self.wait)


def _kind(call: Record) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks in one collective."""
    sizes = (call["bytes"], call["dtype"]) if call["name"] in _EQUAL_SIZES else ()
    return call["name"], call.get("op"), call.get("peer"), *sizes


def _differences(ranks: list[_Rank]) -> Iterator[Finding]:
    """Yield the collectives that one rank calls and another one calls differently.

    Gradients of different steps differ, too: a rank that skips an exchange stays a step ahead.
    """
    for one, other in combinations(ranks, 2):
        count_steps = one.by_kind["step"] and other.by_kind["step"]
        for (group, members), calls in list(one.queues.items()):
            ahead = None
            theirs = other.queues[group, members]
            for number, (left, right) in enumerate(zip(calls, theirs, strict=False), 1):
                now = ahead
                if count_steps and left["content"] == right["content"] == "gradient":
                    now = right["step"] - left["step"]
                    ahead = now if ahead is None else ahead
                same = _kind(left) == _kind(right) and now == ahead
                if not same and left["name"] not in POINT_TO_POINT:
                    yield found(
                        "collectives-differ",
                        code_line(left["at"]),
                        kind="calls",
                        number=number,
                        where=f" of the group of ranks {list(members)}" if group else "",
                        one=one.number,
                        left=_describe(left),
                        step=left["step"],
                        other=other.number,
                        right=_describe(right),
                        other_step=right["step"],
                    )


def _in_vain(ranks: list[_Rank]) -> Iterator[Finding | Unknown]:
    """Yield that a rank waited in vain for another one."""
    for one, other in permutations(ranks, 2):
        if one.state != "waits" or not one.lacks(other):
            continue
        call = _describe(one.wait)
        if other.state == "ended" or (other.state == "waits" and one.wait["k"] == "call"):
            yield found(
                "collectives-differ",
                code_line(one.wait["at"]),
                kind=other.state,
                one=one.number,
                call=call,
                other=other.number,
            )
        elif other.state in _LEFT_OPEN:
            vain = (
                f"gradients: rank {one.number} waited in vain in {call} for rank {other.number}, "
                f"which {_LEFT_OPEN[other.state]}"
            )
            yield Unknown("; ".join([vain, *other.stands]))


def _describe(wait: Record) -> str:
    """Return a call in words, with its line."""
    size = f" of {wait['bytes']:,} bytes" if wait.get("bytes") else ""
    root = f", rank {wait['peer']}" if wait.get("peer") is not None else ""
    at = code_line(wait["at"])
    name = wait.get("name") or "torch.distributed"
    return f"{name}{size}{root}" + ("" if at is None else f" ({at})")


def _agreed(lists: list[list[Record]]) -> Iterator[Right]:
    """Yield that the ranks call the same collectives, if they call any."""
    steps = Counter(call["step"] for call in min(lists, key=len))
    if steps:
        whole = {steps[step] for step in range(1, max(steps))}  # the first and last are not whole
        number = f", {whole.pop()} a step" if len(whole) == 1 and 0 not in whole else ""
        yield Right(
            f"all ranks call the same collectives in the same order in the watched steps{number}"
        )


def _unused(recording: Recording) -> Iterator[Finding]:
    """Yield that nothing but barriers and rare objects is exchanged, by any known means.

    Each rank must have joined others, or been started as one of several and joined none.
    """
    for rank in recording.ranks:
        own = [_is_own(rank, step) for step in rank.by_kind["step"]]
        hints = {one.get("hint") for one in rank.by_kind["start"]} - {None}
        if len(own) < 2 or not all(own) or not (rank.by_kind["group"] or hints):
            return
    first = recording.ranks[0].by_kind
    calls = Counter(call["name"] for call in first["call"] if call["name"] not in SETUP)
    ended = not any(rank.by_kind["cut"] for rank in recording.ranks)
    yield found(
        "group-unused",
        code_line(first["group"][0]["at"]) if first["group"] else None,
        kind="group" if first["group"] else "alone",
        sure=ended,
        steps=recording.steps,
        ranks=recording.size,
        calls=", ".join(f"{name} {number} times" for name, number in calls.items()) or "none",
        more="" if ended else "; a script that exchanges weights more rarely looks the same",
    )


def _is_own(rank: RankRecords, step: Record) -> bool:
    """Return whether what the optimiser gets is this rank's own gradient, or a multiple of it."""
    own, got = (np.array(rank.numbers(step[name]), dtype=np.float64) for name in ("own", "got"))
    return bool(np.dot(own, got) > (1 - 1e-4) * np.linalg.norm(own) * np.linalg.norm(got))
