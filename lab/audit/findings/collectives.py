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

from common.say import listed
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found, gravest
from lab.audit.findings.where import POINT_TO_POINT, SETUP, in_step, recording_exchanges
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    Backward,
    CollectiveCall,
    Cut,
    Done,
    Error,
    Group,
    Parameter,
    Parameters,
    ProcessEnd,
    Stack,
    Stands,
    Start,
    Step,
)

# What tells which calls of two ranks may belong together, see ``_Rank.queue``.
Queue = tuple[str, tuple[Any, ...]]
Wait = CollectiveCall | Stands | Error

_OF_ALL: Queue = ("", ())
_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
_PEER_LEFT = re.compile(r"[Cc]onnection (was )?(closed|reset)|Broken pipe|[Tt]imed out")
_LEFT_OPEN = {
    "busy": "was elsewhere when the run had to be ended",
    "gone": "did not end in good order",
}


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield ``collectives-differ`` or that they agree, and ``group-unused``."""
    yield from _meets_apart(recording)
    if recording.size < 2 or len(recording.ranks) < 2:
        return
    all_here = len(recording.ranks) == recording.size
    yield from _compare(recording, all_here=all_here)
    if all_here and not recording_exchanges(recording):
        yield from _unused(recording)


def _meets_apart(recording: Recording) -> Iterator[Finding]:
    """Yield that the ranks wait for each other at different places."""
    calls = []
    for process in recording.processes:
        mine = [call for call in process.of(CollectiveCall) if call.name == "init_process_group"]
        calls += mine[:1]
    places = sorted({call.meets for call in calls if call.meets})
    if len(places) > 1 and not any(process.of(Group) for process in recording.processes):
        yield found("different-meeting-places", calls[0].at, places=listed(places, most=4))


def _compare(recording: Recording, *, all_here: bool) -> Iterator[Outcome]:
    """Yield the gravest difference between the ranks' calls, or that they agree."""
    ranks = [_Rank(rank, recording.hung) for rank in recording.ranks]
    states = {rank.state for rank in ranks}
    outcomes: list[Outcome] = [*_mispaired(ranks), *_differences(ranks)]
    if all_here and "failed" not in states:  # else a death explains it
        outcomes += _in_vain(ranks)
    different = gravest(outcomes)
    if isinstance(different, Finding):
        stands = [rank.stands for rank in ranks if rank.stands]
        yield replace(different, evidence=(*different.evidence, *stands))
    elif different is not None:
        yield different
    elif not recording.hung and "waits" not in states:
        yield from _agreed([rank.queues[_OF_ALL] for rank in ranks])


class _Rank:
    """What a rank called before its cut, and where it was seen last.

    Attributes
    ----------
    number : the rank.
    steps : those that it takes, if any, so that its calls tell in which step they were made.
    queues : its calls, in order, by ``queue``: those that must match calls of other ranks.
    stands : at which line it stood, in a sentence; "" if that is not known.
    state : "cut", "waits", "failed" (of itself), "ended", "busy" or "gone".
    wait : in what it waits in vain: a call, or another record with its line. A call may just have
        begun when a run of ranks that do not stand still is ended.
    """

    def __init__(self, records: RankRecords, hung: bool) -> None:
        self.number = records.rank
        self.steps = {step.step for step in records.of(Step)}
        self._parameters: dict[int, Parameter] = {}
        for parameters in records.of(Parameters):
            for row in parameters.rows:
                self._parameters[row.tensor] = row
        calls = [
            record
            for record in takewhile(lambda record: not isinstance(record, Cut), records.records)
            if isinstance(record, CollectiveCall) and record.size and record.name not in SETUP
        ]
        self.queues: dict[Queue, list[CollectiveCall]] = defaultdict(list)
        for call in calls:
            self.queues[self.queue(call)].append(call)
        self.stands = _where_it_stands(records)
        self.wait = _find_wait(records, calls, hung)
        self.state = _find_state(records, self.wait, hung)

    def queue(self, call: CollectiveCall) -> Queue:
        """Return the key of a call in ``queues``.

        That is the name and the ranks of its group: ("", ()) for the group of all ranks. For a
        point-to-point message it is "tensors" or "objects", and the sender and the receiver. The
        sender is None if it may be any rank.
        """
        if call.name in POINT_TO_POINT:
            what = "objects" if "object" in call.name else "tensors"
            if "send" in call.name:
                return what, (self.number, call.peer)
            return what, (call.peer, self.number)
        if call.group is None:
            return _OF_ALL
        return str(call.group.name), tuple(call.group.ranks)

    def parameter(self, call: CollectiveCall) -> Parameter | None:
        """Return the first parameter whose gradient a call exchanges, as far as that is known."""
        return None if call.parameter is None else self._parameters.get(call.parameter)

    def leaves_out(self, parameter: Parameter, queue: Queue, step: int) -> bool:
        """Return whether it has done a step, and exchanged no gradient of a parameter in it."""
        for call in in_step(self.queues[queue], step):
            sent = self.parameter(call)
            if sent is not None and _is_one(sent, parameter):
                return False
        return step in self.steps

    def lacks(self, other: "_Rank") -> bool:
        """Return whether the other one takes part in too few calls for this wait to end.

        DistributedDataParallel waits in no call: it lacks any rank that has ended.
        """
        if not isinstance(self.wait, CollectiveCall):
            return True
        queue = self.queue(self.wait)
        name, ranks = queue
        if ranks and other.number not in ranks:
            return False
        from_any_rank = (None, *ranks[1:])  # a receive that also answers this sender
        answers = other.queues[queue] + other.queues[name, from_any_rank]
        calls_before = self.queues[queue].index(self.wait)
        return len(answers) <= calls_before


def _where_it_stands(records: RankRecords) -> str:
    """Return the sentence ``_Rank.stands``."""
    lines = [stack.at for stack in records.of(Stack)] + [wait.at for wait in records.of(Stands)]
    known = [line for line in lines if line is not None]
    return f"rank {records.rank} stands at {known[-1]}" if known else ""


def _find_wait(records: RankRecords, calls: list[CollectiveCall], hung: bool) -> Wait | None:
    """Return in what a rank waits in vain; None if it does not.

    It is the first call that failed or never returned, else its last record if that says where it
    stands, else an error since another rank has left.

    calls : those before its cut.
    """
    last = [record for record in records.records if not isinstance(record, Stack)][-1]
    stands = last if isinstance(last, Stands) else None
    # By call, the error of its latest return: a Work may be waited for twice. None: it succeeded.
    errors = {done.call_number: done.error for done in records.of(Done)}
    if stands is not None and stands.call_number is not None:
        errors[stands.call_number] = "stands"  # counts as failed
    for call in calls:
        never_returned = call.number not in errors
        # in a run that hung, a call without a return may just have begun
        if errors.get(call.number) or (never_returned and not hung):
            return call
    if stands is not None:
        return stands
    left = [error for error in records.of(Error) if _PEER_LEFT.search(error.message)]
    return left[0] if left else None


def _find_state(records: RankRecords, wait: Wait | None, hung: bool) -> str:
    """Return ``_Rank.state``: what its records say, the first that applies."""
    if records.of(Cut):
        return "cut"
    if wait is not None:
        return "waits"
    if records.of(Error) or any(end.status for end in records.of(ProcessEnd)):
        return "failed"
    if records.of(ProcessEnd):
        return "ended"
    return "busy" if hung else "gone"


def _kind(call: CollectiveCall) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks in one collective."""
    kind = (call.name, call.op, call.peer)
    return (*kind, call.nbytes, call.dtype) if call.name in _EQUAL_SIZES else kind


def _is_one(left: Parameter, right: Parameter) -> bool:
    """Return whether two ranks' rows may be of one parameter."""
    return left.name == right.name or left.key == right.key or left.tensor == right.tensor


def _mispaired(ranks: list[_Rank]) -> Iterator[Finding]:
    """Yield the first collective of two ranks that meets gradients of different parameters."""
    for one, other in combinations(ranks, 2):
        for queue, calls in list(one.queues.items()):
            pairs = zip(calls, other.queues[queue], strict=False)
            for number, (left, right) in enumerate(pairs, 1):
                mine = one.parameter(left)
                theirs = other.parameter(right)
                if mine is None or theirs is None or _is_one(mine, theirs):
                    continue
                sides = [(one, mine, left), (other, theirs, right)]
                if one.leaves_out(theirs, queue, left.step):
                    sides.reverse()  # the one that skips a parameter comes last
                (sender, sent, _), (skipper, met, call) = sides
                skips = skipper.leaves_out(sent, queue, call.step)
                yield found(
                    "gradients-mispaired",
                    call.at,
                    kind="skipped" if skips else "met",
                    step=call.step,
                    number=number,
                    one=sender.number,
                    left=sent.name,
                    other=skipper.number,
                    right=met.name,
                )
                break


def _differences(ranks: list[_Rank]) -> Iterator[Finding]:
    """Yield the collectives that one rank calls and another one calls differently.

    The n-th calls of two ranks in one group are compared with each other.
    """
    for one, other in combinations(ranks, 2):
        for queue, calls in list(one.queues.items()):
            pairs = list(zip(calls, other.queues[queue], strict=False))
            count_steps = bool(one.steps and other.steps)
            for number in _unequal(pairs, count_steps=count_steps):
                left, right = pairs[number - 1]
                group, members = queue
                yield found(
                    "collectives-differ",
                    left.at,
                    kind="calls",
                    number=number,
                    where=f" of the group of ranks {list(members)}" if group else "",
                    one=one.number,
                    left=_describe(left),
                    step=left.step,
                    other=other.number,
                    right=_describe(right),
                    other_step=right.step,
                )


def _unequal(
    pairs: list[tuple[CollectiveCall, CollectiveCall]], *, count_steps: bool
) -> Iterator[int]:
    """Yield the numbers, from 1, of the pairs of two ranks' calls that are no one collective.

    Gradients of different steps differ, too: a rank that skips an exchange stays a step ahead. It
    may be ahead from the first exchange on.
    """
    first_lead: int | None = None  # in steps, of the right rank at the first exchange
    for number, (left, right) in enumerate(pairs, 1):
        lead = first_lead
        if count_steps and left.content == right.content == "gradient":
            lead = right.step - left.step
            if first_lead is None:
                first_lead = lead
        same = _kind(left) == _kind(right) and lead == first_lead
        if not same and left.name not in POINT_TO_POINT:
            yield number


def _in_vain(ranks: list[_Rank]) -> Iterator[Finding | Unknown]:
    """Yield that a rank waited in vain for another one.

    It is a finding if that one waits elsewhere or has ended; unknown if nobody knows what it did.
    """
    for one, other in permutations(ranks, 2):
        wait = one.wait
        if wait is None or one.state != "waits" or not one.lacks(other):
            continue
        waits_elsewhere = other.state == "waits" and isinstance(wait, CollectiveCall)
        if waits_elsewhere or other.state == "ended":
            yield found(
                "collectives-differ",
                wait.at,
                kind=other.state,
                one=one.number,
                call=_describe(wait),
                other=other.number,
            )
        elif other.state in _LEFT_OPEN:
            vain = (
                f"rank {one.number} waited in vain in {_describe(wait)} for rank "
                f"{other.number}, which {_LEFT_OPEN[other.state]}"
            )
            yield Unknown("collectives", f"{vain}; {other.stands}" if other.stands else vain)


def _describe(wait: Wait) -> str:
    """Return a call in words, with its line."""
    name = None if isinstance(wait, Error) else wait.name
    text = name or "torch.distributed"
    if isinstance(wait, CollectiveCall) and wait.nbytes:
        text += f" of {wait.nbytes:,} bytes"
    if isinstance(wait, CollectiveCall) and wait.peer is not None:
        text += f", rank {wait.peer}"
    return text if wait.at is None else f"{text} ({wait.at})"


def _agreed(lists: list[list[CollectiveCall]]) -> Iterator[Right]:
    """Yield that the ranks call the same collectives, or that none waits in those of DDP."""
    steps = Counter(call.step for call in min(lists, key=len))
    if not steps:
        yield Right("collectives", "no rank waited in vain for another one")
        return
    text = "all ranks call the same collectives in the same order"
    numbers = {steps[step] for step in range(1, max(steps))}  # the first and last are not whole
    if len(numbers) == 1 and 0 not in numbers:
        text += f", {numbers.pop()} a step"
    yield Right("collectives", text)


def _unused(recording: Recording) -> Iterator[Outcome]:
    """Yield that each rank trains alone: nothing but barriers and rare objects was exchanged."""
    idle = [rank.rank for rank in recording.ranks if not any((rank.of(Backward), rank.of(Step)))]
    training = [rank for rank in recording.ranks if rank.rank not in idle]
    if not training or not all(_trains_alone(rank) for rank in training):
        return
    first = training[0]
    if idle:
        yield from _idle(recording, first, idle)
        return
    calls = Counter(call.name for call in first.of(CollectiveCall) if call.name not in SETUP)
    groups = first.of(Group)
    was_cut = bool(recording.of(Cut))
    more = "; a script that exchanges weights more rarely looks the same"
    yield found(
        "group-unused",
        groups[0].at if groups else None,
        kind="group" if groups else "alone",
        sure=not was_cut,
        steps=recording.steps,
        ranks=recording.size,
        calls=", ".join(f"{name} {number} times" for name, number in calls.items()) or "none",
        more=more if was_cut else "",
    )


def _idle(recording: Recording, first: RankRecords, idle: list[int]) -> Iterator[Outcome]:
    """Yield that some ranks compute nothing. Before the script's end they may only wait.

    first : one that trains.
    """
    ended = not recording.hung and not recording.of(Cut) and not recording.of(Error)
    others = ", ".join(map(str, idle))
    if not ended:
        yield Unknown(
            "gradients", f"rank {first.rank} trains, and rank {others} has computed nothing so far"
        )
        return
    yield found(
        "group-unused",
        first.of(Step)[0].at,
        kind="idle",
        rank=first.rank,
        steps=len(first.of(Step)),
        idle=others,
    )


def _trains_alone(rank: RankRecords) -> bool:
    """Return whether a rank's optimisers get its own gradients in all of several steps.

    It must have joined others, or have been started as one of several.
    """
    steps = rank.of(Step)
    hinted = any(start.hinted_rank is not None for start in rank.of(Start))
    if len(steps) < 2 or not (rank.of(Group) or hinted):
        return False
    return all(_is_own(rank, step) for step in steps if step.sampled)


def _is_own(rank: RankRecords, step: Step) -> bool:
    """Return whether what the optimiser gets is this rank's own gradient, or a multiple of it."""
    own = rank.numbers(step.own)
    got = rank.numbers(step.got)
    # the cosine of their angle is 1
    return bool(np.dot(own, got) > (1 - 1e-4) * np.linalg.norm(own) * np.linalg.norm(got))
