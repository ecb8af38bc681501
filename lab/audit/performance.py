"""The time of a step of the audited script, and what the cost model predicts for its model.

``measure`` returns both as plain values, for the terminal, JSON and the page. The times are those
of a script that the probe watches, without the first two steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from common.cost_model.calibration_file import find_calibration
from common.cost_model.compute_model import StepCompute
from common.cost_model.event_model import predict_step
from common.errors import UserError
from common.sync.message_cost import GradientSize, sent_bytes
from common.utils.system import usable_cores
from lab.audit.recording import RankRecords, Record, Recording
from lab.predict.tables import message_plans

WARM_UP = 2  # steps left out: the first ones allocate and connect
PREDICTED = ("ddp", "overlapped")
_ITEM_BYTES = {"float64": 8, "double": 8, "float16": 2, "half": 2, "bfloat16": 2}
_KINDS = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",  # its name from torch 2.14 on
    "_all_gather_base": "all_gather",
}
_OTHERS_SENT = {
    "send": 1.0,
    "isend": 1.0,
    "reduce_scatter": None,  # None: all but this rank's own part
    "reduce_scatter_tensor": None,
    "reduce_scatter_single": None,
    "_reduce_scatter_base": None,
    "all_to_all": None,
    "all_to_all_single": None,
}


@dataclass(frozen=True)
class ObservedStep:
    """One rank's step, from one update to the next.

    Parameters
    ----------
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


def measure(recording: Recording, *, rate_bits: float | None = None) -> dict[str, Any] | None:
    """Return the step's time, exposed communication, bytes and predictions; None without steps.

    rate_bits : bits a second of each emulated node's link; None: the ranks share this machine.
    """
    observed = {
        rank.rank: [observe(rank, recording.size, *window) for window in windows(rank)]
        for rank in recording.ranks
    }
    typical = {rank: _combine(steps, median) for rank, steps in observed.items() if steps}
    if not typical:
        return None
    mean = _combine(list(typical.values()), fmean)
    cores, note = usable_cores(), ""
    if rate_bits is None and recording.size > cores:
        note = f"{recording.size} ranks share {cores} cores, so a step is slower than on nodes"
    rank = next(one for one in recording.ranks if one.rank in typical)
    return {
        "ranks": recording.size,
        **asdict(mean),
        "exposed_share": mean.exposed_seconds / mean.seconds if mean.seconds else 0.0,
        "most_bytes_sent": max(one.bytes_sent for steps in observed.values() for one in steps),
        "note": note,
        **_predict(rank, recording.size, mean, rate_bits),
    }


def _combine(
    steps: Sequence[ObservedStep], combine: Callable[[Sequence[float]], float]
) -> ObservedStep:
    """Return the mean or the median of each number."""
    return ObservedStep(*map(combine, zip(*map(astuple, steps), strict=True)))


def windows(rank: RankRecords) -> list[tuple[float, float]]:
    """Return the begin and end of the measured steps: the times just before an update.

    With several optimisers these are the updates of the one that steps first.
    """
    updates = rank.by_kind["step"]
    times = [one["t"] for one in updates if one["o"] == updates[0]["o"]]
    found = list(pairwise(times))
    return found[WARM_UP:] or found[-1:]


def observe(rank: RankRecords, size: int, begin: float, end: float) -> ObservedStep:
    """Return what a rank did between two times."""
    calls = _within(rank.by_kind["call"], begin, end)
    blocked = _blocked(rank)
    backwards = list(_within(rank.by_kind["backward"], begin, end))
    in_backward = sum(
        overlap(blocked, one["t"] - (one["seconds"] or 0.0), one["t"]) for one in backwards
    )
    exposed = sum(one.get("exposed_seconds") or 0.0 for one in backwards)
    backward = sum(one["seconds"] or 0.0 for one in backwards) - exposed - in_backward
    sent = sum(_sent(call, rank.rank) for call in calls)
    if _through_ddp(backwards):
        # DDP sends in C++, where no call is seen, in each backward outside no_sync().
        models = rank.by_kind["ddp"]
        times = sum(one.get("synced") is True for one in backwards) // max(1, len(models))
        nbytes = max(1, times) * sum(one["bytes"] or 0 for one in models)
        sent += float(sent_bytes("all_reduce", nbytes, rank=rank.rank, ranks=size))
    return ObservedStep(
        seconds=end - begin,
        exposed_seconds=exposed + overlap(blocked, begin, end),
        backward_seconds=max(0.0, backward),
        update_seconds=sum(
            one["seconds"] or 0.0 for one in _within(rank.by_kind["stepped"], begin, end)
        ),
        bytes_sent=sent,
    )


def _within(records: Sequence[Record], begin: float, end: float) -> Iterator[Record]:
    return (one for one in records if begin < one["t"] <= end)


def _blocked(rank: RankRecords) -> list[tuple[float, float]]:
    """Return when calls held the script up: begin and end of each, in order.

    A call in a thread of the script's own does not hold up backward.
    """
    passes = [(one["t"] - (one["seconds"] or 0.0), one["t"]) for one in rank.by_kind["backward"]]
    spans: list[tuple[float, float]] = []
    for one in rank.by_kind["done"]:
        seconds = (one.get("seconds") or 0.0) + (one.get("wait_seconds") or 0.0)
        begin, end = one["t"] - seconds, one["t"]
        for first, last in passes if one.get("own_thread") else ():
            if begin < last and first < end:
                spans.append((begin, first))
                begin = last
        spans.append((begin, end))
    return sorted(span for span in spans if span[0] < span[1])


def overlap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between two times that sorted spans cover; several threads may wait."""
    covered, at = 0.0, begin
    for first, last in spans:
        first, last = max(first, at), min(last, end)
        covered += max(0.0, last - first)
        at = max(at, last)
    return covered


def _sent(call: Record, rank: int) -> float:
    """Return the bytes that a rank sends in a call; 0 for a call of no known formula."""
    name, nbytes, ranks = call["name"], call.get("bytes") or 0, call.get("size") or 1
    if ranks < 2:
        return 0.0
    if name in _KINDS:
        root = call.get("peer") or 0
        return float(sent_bytes(_KINDS[name], nbytes, rank=rank, ranks=ranks, root=root))
    share = _OTHERS_SENT.get(name, 0.0)
    return nbytes * ((ranks - 1) / ranks if share is None else share)


def _through_ddp(backwards: Sequence[Record]) -> bool:
    return any(one[2] == "ddp" for record in backwards for one in record["forwards"] or [])


def _predict(
    rank: RankRecords, size: int, mean: ObservedStep, rate_bits: float | None
) -> dict[str, Any]:
    """Return "predicted" (a list of strategy, step_seconds, exposed_seconds) and "source"."""
    sizes = _gradient_sizes(rank)
    if size < 2 or not sum(sizes) or not mean.backward_seconds:
        return {"predicted": [], "source": ""}
    try:
        calibration, is_reference = find_calibration()
    except UserError as error:
        return {"predicted": [], "source": f"no prediction: {error}"}
    plans = message_plans(PREDICTED)
    network = calibration.network.over(rate_bits=rate_bits, latency_seconds=None)
    compute = _compute(mean, sizes)
    predicted = []
    for name, plan in plans.items():
        step = predict_step(plan, sizes, size, network=network, compute=compute)
        predicted.append(
            {
                "strategy": name,
                "step_seconds": step.step_seconds,
                "exposed_seconds": step.sync_seconds,
                "bytes_sent": step.bytes_sent_others,
            }
        )
    links = "loopback" if rate_bits is None else f"links of {rate_bits / 1e6:,.0f} Mbit/s"
    source = f"{links} as calibrated on {calibration.name}, {calibration.made[:10]}"
    elsewhere = "; `lab calibrate` measures this machine" if is_reference else ""
    return {"predicted": predicted, "source": source + elsewhere}


def _gradient_sizes(rank: RankRecords) -> list[GradientSize]:
    """Return the gradients' sizes in the order in which the optimisers got the parameters."""
    rows = {row[0]: row for record in rank.by_kind["params"] for row in record["rows"]}
    return [
        GradientSize(shape, _ITEM_BYTES.get(str(dtype).removeprefix("torch."), 4))
        for _, _, shape, dtype, *_ in rows.values()
    ]


def _compute(mean: ObservedStep, sizes: Sequence[int]) -> StepCompute:
    """Return the measured step without messages; backward's time is spread by bytes."""
    ready = list(accumulate(reversed(sizes)))
    before = mean.seconds - mean.exposed_seconds - mean.backward_seconds - mean.update_seconds
    return StepCompute(
        before_seconds=max(0.0, before),
        backward_seconds=mean.backward_seconds,
        update_seconds=mean.update_seconds,
        ready_bytes=ready,
        ready_shares=[count / ready[-1] for count in ready],
    )
