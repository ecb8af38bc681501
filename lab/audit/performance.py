"""The time of a step of the audited script, and what the cost model predicts for its model.

``measure`` returns both as plain values, for the terminal, JSON and the page. The times are those
of a script that the probe watches, without the first two steps.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from common.errors import UserError
from common.sync.message_cost import GradientSize, sent_bytes
from common.utils.system import usable_cores
from lab.audit.recording import RankRecords, Record, Recording
from lab.predict.calibration_file import find_calibration
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import predict_step
from lab.predict.tables import message_plans
from lab.report.drawings.timeline import union

WARM_UP = 2  # steps left out: the first ones allocate and connect
_ITEM_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}
# What a name of torch.distributed begins with: it may end in _base, _into_tensor or _single.
_KIND = re.compile(
    "_?(all_reduce|all_gather|all_to_all|reduce_scatter|reduce|broadcast|gather|scatter|i?send)"
)


def measure(recording: Recording, *, rate_bits: float | None = None) -> dict[str, Any] | None:
    """Return the step's time, exposed communication, bytes and predictions; None without steps.

    rate_bits : bits a second of each emulated node's link; None: the ranks share this machine.
    """
    observed = [*filter(None, (_steps(rank, recording.size) for rank in recording.ranks))]
    if not observed:
        return None
    mean = {
        name: float(np.mean([np.median([step[name] for step in steps]) for steps in observed]))
        for name in observed[0][0]
    }
    size, cores = recording.size, usable_cores()
    return {
        "ranks": size,
        **mean,
        "exposed_share": mean["exposed_seconds"] / mean["seconds"] if mean["seconds"] else 0.0,
        "most_bytes_sent": max(step["bytes_sent"] for steps in observed for step in steps),
        "note": f"{size} ranks share {cores} cores, so a step is slower than on nodes"
        if rate_bits is None and size > cores
        else "",
        **_predict(recording.ranks[0], size, mean, rate_bits),
    }


def _steps(rank: RankRecords, size: int) -> list[dict[str, float]]:
    """Return what a rank did in each measured step, from just before an update to the next.

    With several optimisers these are the updates of the one that steps first.
    """
    updates = rank.by_kind["step"]
    windows = list(pairwise(one["t"] for one in updates if one["o"] == updates[0]["o"]))
    blocked = _blocked(rank)
    return [_observe(rank, size, blocked, *one) for one in windows[WARM_UP:] or windows[-1:]]


def _observe(
    rank: RankRecords, size: int, blocked: list[tuple[float, float]], begin: float, end: float
) -> dict[str, float]:
    """Return what a rank did between two times.

    exposed_seconds : communication that backward does not hide: calls that block, waiting for
        others, and the end of DDP's backward after this rank's last gradient.
    backward_seconds : of backward, without the exposed communication in it.
    bytes_sent : payload that this rank sends, by the closed forms of Gloo's algorithms.
    """
    calls, backwards, updates = (
        [one for one in rank.by_kind[kind] if begin < one["t"] <= end]
        for kind in ("call", "backward", "stepped")
    )
    exposed = sum(one.get("exposed_seconds") or 0.0 for one in backwards)
    computed = sum(
        one["seconds"] - _overlap(blocked, one["t"] - one["seconds"], one["t"]) for one in backwards
    )
    sent = sum(_sent(call, rank.rank) for call in calls)
    through_ddp = any(row[2] == "ddp" for one in backwards for row in one["forwards"])
    if through_ddp and not rank.by_kind["hook"]:
        # DDP sends in C++, where no call is seen, in each backward outside no_sync().
        models = rank.by_kind["ddp"]
        times = sum(one.get("synced") is True for one in backwards) // max(1, len(models))
        nbytes = max(1, times) * sum(one["bytes"] for one in models)
        sent += float(sent_bytes("all_reduce", nbytes, rank=rank.rank, ranks=size))
    return {
        "seconds": end - begin,
        "exposed_seconds": exposed + _overlap(blocked, begin, end),
        "backward_seconds": max(0.0, computed - exposed),
        "update_seconds": sum(one["seconds"] for one in updates),
        "bytes_sent": sent,
    }


def _blocked(rank: RankRecords) -> list[tuple[float, float]]:
    """Return when calls held the script up, as disjoint spans: several threads may wait at once.

    A call in a thread of the script's own holds up what follows backward, not backward.
    """
    passes = [(one["t"] - one["seconds"], one["t"]) for one in rank.by_kind["backward"]]
    spans = []
    for one in rank.by_kind["done"]:
        end = one["t"]
        begin = end - one["seconds"] - (one.get("wait_seconds") or 0.0)
        if one.get("own_thread"):
            begin = max([begin, *(last for first, last in passes if first < end)])
        spans.append((begin, end))
    return union(spans)


def _overlap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between two times that disjoint spans cover."""
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)


def _sent(call: Record, rank: int) -> float:
    """Return the bytes that a rank sends in a call; 0 for a call of no known formula."""
    match, nbytes, ranks = _KIND.match(call["name"]), call.get("bytes"), call.get("size") or 1
    if match is None or not nbytes or ranks < 2:
        return 0.0
    if match[1].endswith("send"):
        return float(nbytes)
    return float(sent_bytes(match[1], nbytes, rank=rank, ranks=ranks, root=call.get("peer") or 0))


def _predict(
    rank: RankRecords, size: int, mean: dict[str, float], rate_bits: float | None
) -> dict[str, Any]:
    """Return "predicted" (a list of strategy, step_seconds, exposed_seconds) and "source".

    The compute is the measured step without messages; backward's time is spread by bytes.
    """
    rows = {row[0]: row for record in rank.by_kind["params"] for row in record["rows"]}
    sizes = [  # in the order in which the optimisers got the parameters
        GradientSize(shape, _ITEM_BYTES.get(str(dtype).removeprefix("torch."), 4))
        for _, _, shape, dtype, *_ in rows.values()
    ]
    ready = list(accumulate(reversed(sizes)))
    if size < 2 or not sum(sizes) or not mean["backward_seconds"]:
        return {"predicted": [], "source": ""}
    try:
        calibration, is_reference = find_calibration()
    except UserError as error:
        return {"predicted": [], "source": f"no prediction: {error}"}
    network = calibration.network.over(rate_bits=rate_bits, latency_seconds=None)
    measured = ("exposed_seconds", "backward_seconds", "update_seconds")
    compute = StepCompute(
        before_seconds=max(0.0, mean["seconds"] - sum(mean[name] for name in measured)),
        backward_seconds=mean["backward_seconds"],
        update_seconds=mean["update_seconds"],
        ready_bytes=ready,
        ready_shares=[count / ready[-1] for count in ready],
    )
    predicted = (
        (name, predict_step(plan, sizes, size, network=network, compute=compute))
        for name, plan in message_plans(("ddp", "overlapped")).items()
    )
    links = "loopback" if rate_bits is None else f"links of {rate_bits / 1e6:,.0f} Mbit/s"
    elsewhere = "; `lab calibrate` measures this machine" if is_reference else ""
    return {
        "predicted": [
            {
                "strategy": name,
                "step_seconds": step.step_seconds,
                "exposed_seconds": step.sync_seconds,
                "bytes_sent": step.bytes_sent_others,
            }
            for name, step in predicted
        ],
        "source": f"{links} as calibrated on {calibration.name}, {calibration.made[:10]}"
        f"{elsewhere}",
    }
