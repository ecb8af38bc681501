"""The time of a step of the audited script, and what the cost model predicts for its model.

``measure`` returns both, for the terminal, JSON and the page. The times are those of a script that
the probe watches, without the first two steps.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from common.errors import UserError
from common.say import rate_text
from common.sync.message_cost import GradientSize, sent_bytes
from common.utils.system import usable_cores
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    AnyRecord,
    Backward,
    CollectiveCall,
    DdpBuilt,
    DdpHook,
    Done,
    Parameters,
    Step,
    Stepped,
)
from lab.predict.calibration_file import find_calibration
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import predict_step
from lab.predict.tables import message_plans
from lab.report.timeline import union

Timed = TypeVar("Timed", bound=AnyRecord)
Spans = Sequence[tuple[float, float]]

WARM_UP = 2  # steps left out: the first ones allocate and connect
_ITEM_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}
# What a name of torch.distributed begins with: it may end in _base, _into_tensor or _single.
_KIND = re.compile(
    "_?(all_reduce|all_gather|all_to_all|reduce_scatter|reduce|broadcast|gather|scatter|i?send)"
)


class StrategyStep(msgspec.Struct, frozen=True):
    """A step with a strategy of this project; the fields are keys of the JSON file."""

    strategy: str
    step_seconds: float
    exposed_seconds: float
    bytes_sent: float


class Performance(msgspec.Struct, frozen=True):
    """The measured and the predicted steps; the fields are keys of the JSON file.

    Parameters
    ----------
    seconds, ..., bytes_sent : of a step, see ``_StepTimes``: the median of a rank's steps, and of
        these the mean over the ranks.
    exposed_share : of the step's seconds.
    most_bytes_sent : by any rank in any step.
    source : what the predictions rest on, or why there are none; "" if nothing is to be said.
    """

    ranks: int
    seconds: float
    exposed_seconds: float
    backward_seconds: float
    update_seconds: float
    bytes_sent: float
    exposed_share: float
    most_bytes_sent: float
    note: str
    predicted: Sequence[StrategyStep]
    source: str


class _StepTimes(NamedTuple):
    """What a rank did between two updates.

    exposed_seconds : communication that backward does not hide: calls that block, waiting for
        others, and the end of DDP's backward after this rank's last gradient.
    backward_seconds : of backward, without the exposed communication in it.
    bytes_sent : payload that this rank sends, by the closed forms of Gloo's algorithms.
    """

    seconds: float
    exposed_seconds: float
    backward_seconds: float
    update_seconds: float
    bytes_sent: float


def measure(recording: Recording, *, rate_bits: float | None = None) -> Performance | None:
    """Return the step's time, exposed communication, bytes and predictions; None without steps.

    rate_bits : bits a second of each emulated node's link; None: the ranks share this machine.
    """
    by_rank = [_steps(rank, recording.size) for rank in recording.ranks]
    # The median over a rank's steps of each of their times, then the mean of it over the ranks.
    observed = [steps for steps in by_rank if steps]
    if not observed:
        return None
    medians = [np.median(steps, axis=0) for steps in observed]
    mean = _StepTimes(*(float(np.mean(values)) for values in zip(*medians, strict=True)))
    size = recording.size
    cores = usable_cores()
    note = ""
    if rate_bits is None and size > cores:
        note = f"{size} ranks share {cores} cores, so a step is slower than on nodes"
    predicted, source = _predict(recording.ranks[0], size, mean, rate_bits)
    return Performance(
        ranks=size,
        **mean._asdict(),
        exposed_share=mean.exposed_seconds / mean.seconds if mean.seconds else 0.0,
        most_bytes_sent=max(step.bytes_sent for steps in observed for step in steps),
        note=note,
        predicted=predicted,
        source=source,
    )


# --- what was measured ---


def _steps(rank: RankRecords, size: int) -> list[_StepTimes]:
    """Return what a rank did in each measured step, from just before an update to the next.

    With several optimisers these are the updates of the one that steps first.
    """
    steps = rank.of(Step)
    updates = [step.t for step in steps if step.optimizer_number == steps[0].optimizer_number]
    windows = list(pairwise(updates))
    blocked = _blocked(rank)
    measured = windows[WARM_UP:] or windows[-1:]  # of a short run the last one
    return [_observe(rank, size, blocked, begin, end) for begin, end in measured]


def _observe(rank: RankRecords, size: int, blocked: Spans, begin: float, end: float) -> _StepTimes:
    """Return what a rank did between two times.

    blocked : when calls held the script up.
    begin, end : seconds, as ``t`` of the records, which are written at the end of what they tell.
    """
    backwards = _between(rank.of(Backward), begin, end)
    exposed = sum(backward.exposed_seconds or 0.0 for backward in backwards)
    computed = sum(
        backward.seconds - _overlap(blocked, backward.t - backward.seconds, backward.t)
        for backward in backwards
    )
    updates = _between(rank.of(Stepped), begin, end)
    sent = sum(_sent(call, rank.rank) for call in _between(rank.of(CollectiveCall), begin, end))
    return _StepTimes(
        seconds=end - begin,
        exposed_seconds=exposed + _overlap(blocked, begin, end),
        backward_seconds=max(0.0, computed - exposed),
        update_seconds=sum(update.seconds for update in updates),
        bytes_sent=sent + _sent_by_ddp(rank, size, backwards),
    )


def _between(records: Sequence[Timed], begin: float, end: float) -> list[Timed]:
    return [record for record in records if begin < record.t <= end]


def _blocked(rank: RankRecords) -> Spans:
    """Return when calls held the script up, as disjoint spans: several threads may wait at once.

    A call in a thread of the script's own holds up what follows backward, not backward.
    """
    passes = [(backward.t - backward.seconds, backward.t) for backward in rank.of(Backward)]
    spans = []
    for done in rank.of(Done):
        begin = done.t - done.seconds - (done.wait_seconds or 0.0)
        if done.own_thread:
            ends_of_backwards = [last for first, last in passes if first < done.t]
            begin = max([begin, *ends_of_backwards])
        spans.append((begin, done.t))
    return union(spans)


def _overlap(spans: Spans, begin: float, end: float) -> float:
    """Return the seconds between two times that disjoint spans cover."""
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)


def _sent(call: CollectiveCall, rank: int) -> float:
    """Return the bytes that a rank sends in a call; 0 for a call of no known formula."""
    match = _KIND.match(call.name)
    ranks = call.size or 1
    if match is None or not call.nbytes or ranks < 2:
        return 0.0
    if match[1].endswith("send"):
        return float(call.nbytes)
    root = call.peer or 0
    if call.group is not None and rank in call.group.ranks:  # the place in the group counts
        members = call.group.ranks
        rank = members.index(rank)
        root = members.index(root) if root in members else 0
    return float(sent_bytes(match[1], call.nbytes, rank=rank, ranks=ranks, root=root))


def _sent_by_ddp(rank: RankRecords, size: int, backwards: Sequence[Backward]) -> float:
    """Return the bytes that DDP sends in C++, where no call is seen, in a step's backwards.

    It does so in each backward outside no_sync(), at least once a step. 0 with a communication
    hook, whose calls are seen.
    """
    forwards = [forward for backward in backwards for forward in backward.forwards]
    if rank.of(DdpHook) or not any(forward.through == "ddp" for forward in forwards):
        return 0.0
    models = rank.of(DdpBuilt)
    synced = sum(backward.synced is True for backward in backwards)
    times = max(1, synced // max(1, len(models)))  # each model has backwards of its own
    sent = 0.0
    for model in models:
        ranks = len(model.ranks) or size
        sent += sent_bytes("all_reduce", times * model.nbytes, rank=0, ranks=ranks)  # a ring
    return sent


# --- what is predicted ---


def _predict(
    rank: RankRecords, size: int, mean: _StepTimes, rate_bits: float | None
) -> tuple[list[StrategyStep], str]:
    """Return the step with each strategy, and the source of these predictions.

    There are none without gradients or other ranks, nor without a calibration, as the source says.
    """
    sizes = _gradient_sizes(rank)
    if size < 2 or not sum(sizes) or not mean.backward_seconds:
        return [], ""
    try:
        calibration, is_reference = find_calibration()
    except UserError as error:
        return [], f"no prediction: {error}"
    network = calibration.network.over(rate_bits=rate_bits, latency_seconds=None)
    compute = _compute(sizes, mean)
    predicted = []
    for name, plan in message_plans(("ddp", "overlapped")).items():
        step = predict_step(plan, sizes, size, network=network, compute=compute)
        predicted.append(
            StrategyStep(name, step.step_seconds, step.sync_seconds, step.bytes_sent_others)
        )
    links = "loopback" if rate_bits is None else f"links of {rate_text(rate_bits)}"
    source = f"{links} as calibrated on {calibration.name}, {calibration.made[:10]}"
    if is_reference:
        source += "; `lab calibrate` measures this machine"
    return predicted, source


def _gradient_sizes(rank: RankRecords) -> list[GradientSize]:
    """Return the sizes in the order in which the optimisers got the parameters."""
    rows = {row.key: row for parameters in rank.of(Parameters) for row in parameters.rows}
    return [GradientSize(row.shape, _ITEM_BYTES.get(row.dtype, 4)) for row in rows.values()]


def _compute(sizes: Sequence[GradientSize], mean: _StepTimes) -> StepCompute:
    """Return the measured step without messages.

    Backward has the gradients ready in reversed order, each after a share of its time by bytes.
    """
    others = mean.exposed_seconds + mean.backward_seconds + mean.update_seconds
    ready = list(accumulate(reversed(sizes)))
    return StepCompute(
        before_seconds=max(0.0, mean.seconds - others),
        backward_seconds=mean.backward_seconds,
        update_seconds=mean.update_seconds,
        ready_bytes=ready,
        ready_shares=[count / ready[-1] for count in ready],
    )
