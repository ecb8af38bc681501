"""Facts about a recording that several checks ask for: DDP, exchanges, lines of the script."""

import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, TypeVar

from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    Backward,
    CodeLine,
    CollectiveCall,
    DdpBuilt,
    DdpHook,
    DeviceMesh,
    Done,
    Evaluation,
    FsdpBuilt,
    Parameters,
    RandomForward,
    Step,
    Trained,
)

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list")
SETUP = ("init_process_group", "new_group")
_NO_EXCHANGE = ("barrier", "object", "monitored", *SETUP)


OfStep = TypeVar("OfStep", Backward, CollectiveCall)
OncePerStep = TypeVar("OncePerStep", Evaluation, RandomForward)


class ComputedWith(NamedTuple):
    """What a rank's model and loss got in a backward, as hashes; some may be unknown."""

    inputs: tuple[int | None, ...]
    target: int | None


def computed_with(backward: Backward) -> ComputedWith:
    """Return what a backward computed with."""
    target = None if backward.loss is None else backward.loss.target_hash
    return ComputedWith(tuple(forward.input_hash for forward in backward.forwards), target)


def in_step(records: Iterable[OfStep], step: int) -> list[OfStep]:
    """Return the records of a step."""
    return [record for record in records if record.step == step]


def first_records(
    recording: Recording, kind: type[OncePerStep]
) -> dict[int, dict[int, OncePerStep]]:
    """Return by step and rank the first record of a kind."""
    by_step: dict[int, dict[int, OncePerStep]] = defaultdict(dict)
    for rank in recording.ranks:
        for record in rank.of(kind):
            by_step[record.step].setdefault(rank.rank, record)
    return by_step


def uses_ddp(recording: Recording) -> bool:
    """Return whether the ranks built DistributedDataParallel or FSDP."""
    return bool(recording.of(DdpBuilt) or recording.of(FsdpBuilt))


def averages_weights(recording: Recording) -> bool:
    """Return whether torch's post-local SGD averages the weights from time to time."""
    return any(hook.name == "post_localSGD_hook" for hook in recording.of(DdpHook))


def groups(recording: Recording) -> set[frozenset[int]]:
    """Return the groups of some of the ranks that the script makes, or through which it exchanges.

    They may be the ranks of a node, or one rank of each node.
    """
    members = [call.group.ranks for call in recording.of(CollectiveCall) if call.group is not None]
    members += [ddp.ranks for ddp in recording.of(DdpBuilt)]
    found = {frozenset(ranks) for ranks in members}
    return {group for group in found if 0 < len(group) < recording.size}


def bypasses_ddp(recording: Recording, steps: Container[int]) -> bool:
    """Return whether every training forward of these steps bypasses DDP.

    It runs a module that DDP wraps, in some steps only later, but not through DDP.
    """
    backwards = [backward for backward in recording.of(Backward) if backward.step in steps]
    through = {forward.through for backward in backwards for forward in backward.forwards}
    past = "bypass" in through and "ddp" not in through
    return past and all(rank.of(DdpBuilt) for rank in recording.ranks)


def exchanges(recording: Recording, step: int, content: str | None = None) -> list[CollectiveCall]:
    """Return the calls that exchange tensors by hand in a step; of a content if it is given."""
    calls = filter(_exchanges_tensors, in_step(recording.of(CollectiveCall), step))
    return [call for call in calls if content in (None, call.content)]


def _exchanges_tensors(call: CollectiveCall) -> bool:
    return not any(word in call.name for word in _NO_EXCHANGE)


def recording_exchanges(recording: Recording) -> bool:
    """Return whether the ranks exchange anything but barriers and an object at the start.

    Without any exchange ``group-unused`` says what is wrong, see collectives.py.
    """
    if uses_ddp(recording) or recording.of(DeviceMesh):
        return True
    for rank in recording.ranks:
        calls = [call for call in rank.of(CollectiveCall) if call.name not in SETUP]
        steps_with_objects = {call.step for call in calls if "object" in call.name}
        of_tensors = any(call.nbytes or call.content is None for call in calls)
        if of_tensors or len(steps_with_objects) > 1:
            return True
    return False


def first_step_apart(recording: Recording) -> int:
    """Return the first step in which a rank is in another epoch than the others.

    From there on steps of equal numbers do not belong together, as within torch's ``Join``.
    sys.maxsize if the ranks stay together.
    """
    epochs: dict[tuple[int, int], set[int]] = defaultdict(set)  # by optimiser and step
    for rank in recording.ranks:
        begun = [trained.t for trained in rank.of(Trained)]
        if not begun:  # other ranks may send it its data
            continue
        for step in rank.of(Step):
            epoch = bisect(begun, step.t)  # the number of epochs that began before the step
            epochs[step.optimizer_number, step.step].add(epoch)
    apart = [step for (_, step), seen in epochs.items() if len(seen) > 1]
    return min(apart, default=sys.maxsize)


def lasting_optimizers(recording: Recording) -> list[list[int]]:
    """Return the optimisers of ``lasting_of``, of the rank that has done the most steps."""
    return lasting_of(max(recording.ranks, key=lambda rank: len(rank.of(Step))))


def lasting_of(rank: RankRecords) -> list[list[int]]:
    """Return the optimisers that train the model, by number; together if they share a tensor.

    Others come and go with tensors that are thrown away: copies of the model for one task, or
    inputs that an adversary changes. If there are only such ones, each of them counts; if none has
    done a step, as in a script that failed early, all count. Those that are built before the first
    step count alone, if there are any.
    """
    first = first_parameters(rank)
    series = steps_by_tensor(rank, first)
    kept = [steps for steps in series if not _is_outlived(steps, series)]
    families = [sorted({step.optimizer_number for step in steps}) for steps in kept or series]
    if not families:
        families = [[number] for number in sorted(first)]
    built_later = {number for number, parameters in first.items() if parameters.built > 0}
    early = [family for family in families if not built_later.issuperset(family)]
    return early or families


def first_parameters(rank: RankRecords) -> dict[int, Parameters]:
    """Return by optimiser the first record of its parameters."""
    first: dict[int, Parameters] = {}
    for parameters in rank.of(Parameters):
        first.setdefault(parameters.optimizer_number, parameters)
    return first


def steps_by_tensor(rank: RankRecords, first: dict[int, Parameters]) -> list[list[Step]]:
    """Return a rank's steps by the first tensor, which an optimiser built anew shares."""
    found: dict[int | None, list[Step]] = defaultdict(list)
    for step in rank.of(Step):
        parameters = first.get(step.optimizer_number)
        tensor = None if parameters is None else min(row.tensor for row in parameters.rows)
        found[tensor].append(step)
    return list(found.values())


def _is_outlived(mine: Sequence[Step], series: Iterable[Sequence[Step]]) -> bool:
    """Return whether other tensors are trained afterwards, at least as often."""
    return any(steps[0].t > mine[-1].t and len(steps) >= len(mine) for steps in series)


def exchange_line(recording: Recording, step: int) -> CodeLine | None:
    """Return the line that exchanges gradients, best in a step; else another exchange of the step.

    Calls within forward exchange no gradients.
    """
    every = recording.of(CollectiveCall)
    anywhere = [call for call in every if call.content == "gradient"]
    others = [call for call in exchanges(recording, step) if call.within != "forward"]
    calls = [*exchanges(recording, step, "gradient"), *anywhere, *others]
    return first_line(call.at for call in calls)


def backward_line(recording: Recording) -> CodeLine | None:
    """Return the line of the first backward."""
    return first_line(backward.at for backward in recording.of(Backward))


def first_line(lines: Iterable[CodeLine | None]) -> CodeLine | None:
    """Return the first line that is known."""
    return next((line for line in lines if line is not None), None)


def ends_without_sync(recording: Recording, step: int) -> bool:
    """Return whether DDP averages in some backward of a step, but not in the last, on all ranks."""
    for rank in recording.ranks:
        synced = [backward.synced for backward in in_step(rank.of(Backward), step)]
        if True not in synced or synced[-1] is not False:
            return False
    return True


def never_synced(recording: Recording, step: int) -> bool:
    """Return whether DDP averages in no backward of a step, on any rank: all under no_sync()."""
    synced = [backward.synced for backward in in_step(recording.of(Backward), step)]
    return bool(synced) and all(one is False for one in synced)


def exchanged_before_backward(recording: Recording, step: int) -> bool:
    """Return whether all ranks exchange gradients in a step, and before their first backward."""
    for rank in recording.ranks:
        backwards = in_step(rank.of(Backward), step)
        calls = [
            call for call in in_step(rank.of(CollectiveCall), step) if call.content == "gradient"
        ]
        if not calls or not backwards:
            return False
        last = rank.records.index(calls[-1])
        if calls[-1].within is not None or last > rank.records.index(backwards[0]):
            return False
    return True


def unawaited(recording: Recording, step: int) -> int:
    """Return how many asynchronous exchanges of gradients rank 0 never waits for in a step."""
    rank0 = recording.ranks[0]
    waited = {done.call_number for done in rank0.of(Done) if done.wait_seconds is not None}
    lost = 0
    for call in in_step(rank0.of(CollectiveCall), step):
        if call.content == "gradient" and call.is_async and call.number not in waited:
            lost += 1
    return lost


def samples_of(backward: Backward) -> int:
    """Return on how many samples a backward trained; 0 if that is not known."""
    if backward.loss is not None and backward.loss.samples:
        return backward.loss.samples
    return sum(forward.samples or 0 for forward in backward.forwards)


def local_samples(recording: Recording, step: int) -> list[int]:
    """Return by rank how many samples it trained on in a step; 0 where that is not known."""
    samples = []
    for rank in recording.ranks:
        counts = [samples_of(backward) for backward in in_step(rank.of(Backward), step)]
        samples.append(sum(counts) if all(counts) else 0)
    return samples
