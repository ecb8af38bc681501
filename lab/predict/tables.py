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
from common.sync.plans.base import MessagePlan
from common.utils.registry import choices_text
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.calibration_file import Calibration
from lab.predict.compute_model import LEAST_SAMPLES, StepCompute, local_samples, times
from lab.predict.event_model import (
    LARGEST_NODES,
    Network,
    StepPrediction,
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
    brings: "network", "compute" or "nodes" doubled, and "no messages". ``note`` states the
    condition under which the row holds.
    """

    sync: str
    nodes: int
    prediction: StepPrediction
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
        own_options = dict(options or {})
        if bucket_mb is not None:
            own_options["bucket_mb"] = bucket_mb
        plans[name] = build_message_plan_from(strategy, own_options)
    return plans


def typical_latency(rate_bits: float | None) -> float | None:
    """Return the seconds that a message takes on a link of that rate in one room, by TCP.

    None without a rate. Orders of magnitude: measure your own with `lab calibrate` on the nodes.
    """
    if rate_bits is None:
        return None
    return next(seconds for most, seconds in _LATENCIES if rate_bits <= most)


def compute_of(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> StepCompute:
    """Return the step of one of ``nodes`` ranks.

    own_machines : each rank has a machine of its own; else they are placed as in the calibration.
    """
    if own_machines:
        ranks_here = 1
    elif calibration.over_loopback:
        ranks_here = nodes
    else:
        ranks_here = min(nodes, calibration.ranks_here)
    samples = local_samples(batch_size, nodes, scaling=scaling)
    return calibration.compute.at(samples, ranks_here=ranks_here)


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
    for count in nodes:
        if not 1 <= count <= LARGEST_NODES:
            raise UserError(f"--nodes: got {count}, give 1 to {LARGEST_NODES:,}")
    if batch_size < LEAST_SAMPLES:
        raise UserError(f"--batch-size: got {batch_size}, give {LEAST_SAMPLES} or more")
    network = calibration.network.over(rate_bits=rate_bits, latency_seconds=latency_seconds)
    if rate_bits is None:
        faster = network.faster(2)
    else:
        faster = calibration.network.over(rate_bits=2 * rate_bits, latency_seconds=latency_seconds)
    own_machines = rate_bits is not None or latency_seconds is not None
    setting = _Setting(calibration, network, faster, batch_size, scaling, own_machines)
    return [setting.row(name, plan, count) for count in nodes for name, plan in plans.items()]


@dataclass(frozen=True)
class _Setting:
    """What all rows of a table have in common; ``faster`` is a network of twice the bandwidth."""

    calibration: Calibration
    network: Network
    faster: Network
    batch_size: int
    scaling: str
    own_machines: bool

    def row(self, name: str, asked: MessagePlan, nodes: int) -> PredictedStep:
        """Return a strategy's row; ``asked`` is its plan, perhaps with automatic buckets."""
        compute = self._compute(nodes)
        sizes = self.calibration.gradient_sizes
        plan = with_best_buckets(asked, sizes, nodes, network=self.network, compute=compute)
        step = predict_step(plan, sizes, nodes, network=self.network, compute=compute)
        speedup = self._compute(1).seconds / step.step_seconds
        if self.scaling == "weak":
            speedup *= nodes
        seconds = step.step_seconds
        doubled = min(2 * nodes, LARGEST_NODES)
        more_samples = doubled / nodes if self.scaling == "weak" else 1
        doubled_seconds = self._seconds(asked, doubled, self.network, self._compute(doubled))
        gains = {
            "network": seconds / self._seconds(asked, nodes, self.faster, compute),
            "compute": seconds / self._seconds(asked, nodes, self.network, times(compute, 0.5)),
            "nodes": more_samples * seconds / doubled_seconds,
            "no messages": seconds / compute.seconds,
        }
        note = self._note(name, nodes)
        if plan is not asked:
            note = "; ".join(filter(None, [_buckets_text(name, plan), note]))
        return PredictedStep(name, nodes, step, speedup, speedup / nodes, gains, note)

    def _compute(self, nodes: int) -> StepCompute:
        return compute_of(
            self.calibration,
            nodes,
            batch_size=self.batch_size,
            scaling=self.scaling,
            own_machines=self.own_machines,
        )

    def _seconds(
        self, asked: MessagePlan, nodes: int, network: Network, compute: StepCompute
    ) -> float:
        """Return a step's seconds, with the buckets that are best there."""
        sizes = self.calibration.gradient_sizes
        plan = with_best_buckets(asked, sizes, nodes, network=network, compute=compute)
        return step_seconds(plan, sizes, nodes, network=network, compute=compute)

    def _note(self, name: str, nodes: int) -> str:
        """Return the condition under which the row holds; "" if there is none."""
        if name == "none" and nodes > 1:
            return _NO_EXCHANGE
        if self.scaling == "strong" and nodes * LEAST_SAMPLES > self.batch_size:
            return (
                f"predicted for a global batch of {nodes * LEAST_SAMPLES:,}: BatchNorm needs "
                f"{LEAST_SAMPLES} samples a node"
            )
        cores = self.calibration.cores
        if not self.own_machines and self.calibration.over_loopback and nodes > cores:
            return f"{nodes} ranks share {cores} cores: outside the measured range"
        return ""


def _buckets_text(name: str, plan: MessagePlan) -> str:
    """Return which buckets an automatic choice took."""
    size = getattr(plan, "bucket_mb", None)
    if size is None:
        return f"{name} takes the default buckets"
    return f"{name} takes buckets of {size:g} MiB"


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
    own_machines = rate_bits is not None or latency_seconds is not None
    if not own_machines and calibration.over_loopback:
        return []
    network = calibration.network.over(rate_bits=rate_bits, latency_seconds=latency_seconds)
    found = []
    for scaling in SCALINGS:
        compute_at = partial(
            compute_of,
            calibration,
            batch_size=batch_size,
            scaling=scaling,
            own_machines=own_machines,
        )
        found += scaling_limits(
            plans,
            calibration.gradient_sizes,
            network=network,
            batch_size=batch_size,
            scaling=scaling,
            compute_at=compute_at,
        )
    return found
