"""The arithmetic of ``lab predict``: steps and scaling limits from a calibration. Imports no torch.

``message_plans`` returns what strategies send, ``predict_table`` the time of their steps on given
numbers of nodes, and ``scaling_limits_of`` how far each strategy scales; printing.py and plots.py
show them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.message_plans import MessagePlan
from common.utils.registry import choices_text
from lab.flags import refuse
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.calibration_file import Calibration
from lab.predict.compute_model import LEAST_SAMPLES, StepCompute, local_samples, times
from lab.predict.event_model import (
    LARGEST_NODES,
    Network,
    Prediction,
    predict_step,
    step_seconds,
)
from lab.predict.scaling import SCALINGS, ScalingLimit, scaling_limits
from lab.predict.variants import split_variant

_LATENCIES = ((1e9, 200e-6), (10e9, 50e-6), (math.inf, 20e-6))
_NO_EXCHANGE = "no gradient exchange: each node trains its own model"


@dataclass(frozen=True)
class PredictedStep:
    """One strategy's step on ``nodes`` nodes.

    ``speedup`` is relative to one node; in weak scaling it compares samples per second.
    ``efficiency`` = speedup / nodes. ``gains`` : how many times as many samples per second a change
    brings: bandwidth, compute or nodes doubled, and an infinitely fast network. ``note`` states the
    condition under which the row holds.
    """

    sync: str
    nodes: int
    prediction: Prediction
    speedup: float
    efficiency: float
    gains: Mapping[str, float]
    note: str = ""


def message_plans(
    names: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    groups: Sequence[str] = ("all",),
) -> dict[str, MessagePlan]:
    """Return the message plans of these strategies by name, each with the options that it takes.

    A name may give the size of its buckets (``split_variant``). Raises UserError if a name is
    unknown, with the choices, among them the words that name several strategies (``groups``).
    """
    plans = {}
    for name in names:
        strategy, bucket_mb = split_variant(name)
        if strategy not in STRATEGIES:
            choices = choices_text(name, [*STRATEGIES, *groups])
            raise UserError(f"--sync: got {name}: {choices}")
        own = {} if bucket_mb is None else {"bucket_mb": bucket_mb}
        plans[name] = build_message_plan_from(strategy, {**(options or {}), **own})
    return plans


def typical_latency(rate_bits: float | None) -> float | None:
    """Return the seconds that a message takes on a link of that rate in one room, by TCP.

    None without a rate. Orders of magnitude: measure your own with `lab calibrate` on the nodes.
    """
    return rate_bits and next(seconds for most, seconds in _LATENCIES if rate_bits <= most)


def compute_of(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> StepCompute:
    """Return the step of one of ``nodes`` ranks.

    own_machines : each rank has a machine of its own; else they are placed as in the calibration.
    """
    together = nodes if calibration.over_loopback else min(nodes, calibration.ranks_here)
    return calibration.compute.at(
        local_samples(batch_size, nodes, scaling=scaling),
        ranks_here=1 if own_machines else together,
    )


def predict_table(
    nodes: Sequence[int],
    rate_bits: float | None,
    latency_seconds: float | None,
    plans: Mapping[str, MessagePlan],
    batch_size: int,
    scaling: str,
    calibration: Calibration,
) -> list[PredictedStep]:
    """Return a row for each number of nodes and each strategy.

    plans : by the strategy's name, from ``message_plans``. Without rate and latency the ranks are
    placed as in the calibration: if it measured over loopback, they share one machine. Raises
    UserError on values out of range.
    """
    problems = {
        f"--nodes: got {count}, give 1 to {LARGEST_NODES:,}": not 1 <= count <= LARGEST_NODES
        for count in nodes
    }
    few = f"--batch-size: got {batch_size}, give {LEAST_SAMPLES} or more"
    refuse(problems | {few: batch_size < LEAST_SAMPLES})
    network, faster = (
        calibration.network.over(rate_bits=rate, latency_seconds=latency_seconds)
        for rate in (rate_bits, rate_bits and 2 * rate_bits)
    )
    if rate_bits is None:
        faster = network.faster(2)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "scaling": scaling,
        "own_machines": (rate_bits, latency_seconds) != (None, None),
    }
    alone = compute_of(calibration, 1, **settings).seconds

    def row(name: str, asked: MessagePlan, count: int) -> PredictedStep:
        compute = compute_of(calibration, count, **settings)
        sizes = calibration.gradient_sizes
        plan = with_best_buckets(asked, sizes, count, network=network, compute=compute)
        step = predict_step(plan, sizes, count, network=network, compute=compute)

        def gain(nodes: int = count, links: Network = network, factor: float = 1.0) -> float:
            own = times(compute_of(calibration, nodes, **settings), factor)
            plan = with_best_buckets(asked, sizes, nodes, network=links, compute=own)
            seconds = step_seconds(plan, sizes, nodes, network=links, compute=own)
            return (nodes / count if scaling == "weak" else 1) * step.step_seconds / seconds

        gains = {
            "network": gain(links=faster),
            "compute": gain(factor=0.5),
            "nodes": gain(min(2 * count, LARGEST_NODES)),
            "no messages": step.step_seconds / compute.seconds,
        }
        speedup = (count if scaling == "weak" else 1) * (alone / step.step_seconds)
        note = (
            _NO_EXCHANGE if name == "none" and count > 1 else _note(calibration, count, **settings)
        )
        if plan is not asked:
            size = getattr(plan, "bucket_mb", None)
            chosen = "the default buckets" if size is None else f"buckets of {size:g} MiB"
            note = f"{name} takes {chosen}" + (f"; {note}" if note else "")
        return PredictedStep(name, count, step, speedup, speedup / count, gains, note)

    return [row(name, plan, count) for count in nodes for name, plan in plans.items()]


def scaling_limits_of(
    plans: Mapping[str, MessagePlan],
    calibration: Calibration,
    rate_bits: float | None,
    latency_seconds: float | None,
    batch_size: int,
) -> list[ScalingLimit]:
    """Return how far each strategy scales with a global batch, then with a batch for each node.

    Empty for a calibration over loopback without rate and latency: one machine's cores limit its
    ranks.
    """
    own_machines = (rate_bits, latency_seconds) != (None, None)
    if not own_machines and calibration.over_loopback:
        return []
    return [
        limit
        for scaling in SCALINGS
        for limit in scaling_limits(
            plans,
            calibration.gradient_sizes,
            network=calibration.network.over(rate_bits=rate_bits, latency_seconds=latency_seconds),
            batch_size=batch_size,
            scaling=scaling,
            compute_at=partial(
                compute_of,
                calibration,
                batch_size=batch_size,
                scaling=scaling,
                own_machines=own_machines,
            ),
        )
    ]


def _note(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> str:
    if scaling == "strong" and nodes * LEAST_SAMPLES > batch_size:
        return (
            f"predicted for a global batch of {nodes * LEAST_SAMPLES:,}: BatchNorm needs "
            f"{LEAST_SAMPLES} samples a node"
        )
    if not own_machines and calibration.over_loopback and nodes > calibration.cores:
        return f"{nodes} ranks share {calibration.cores} cores: outside the measured range"
    return ""
