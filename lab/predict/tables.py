"""The arithmetic of ``lab predict``: steps and scaling limits of a scenario. Imports no torch.

``message_plans`` returns what strategies send, ``predict_table`` the time of their steps on given
numbers of nodes, and ``scaling_limits_of`` how far each strategy scales; printing.py and plots.py
show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.plans.base import MessagePlan
from common.utils.registry import choices_text
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.compute_model import StepCompute, times
from lab.predict.event_model import (
    LARGEST_NODES,
    Network,
    StepPrediction,
    predict_step,
    step_seconds,
)
from lab.predict.scaling import SCALINGS, ScalingLimit, scaling_limits
from lab.predict.scenario import Scenario
from lab.predict.variants import split_variant

_NO_EXCHANGE = "no gradient exchange: each node trains its own model"


@dataclass(frozen=True)
class PredictedStep:
    """One strategy's step on ``nodes`` nodes with ``ranks_per_node`` ranks each.

    ``speedup`` is relative to one node; in weak scaling it compares samples per second.
    ``efficiency`` = speedup / nodes. ``gains`` : how many times as many samples per second a change
    brings: "network", "compute" or "nodes" doubled, and "no messages". ``note`` states the
    condition under which the row holds.
    """

    sync: str
    nodes: int
    ranks_per_node: int
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


def predict_table(
    nodes: Sequence[int], plans: Mapping[str, MessagePlan], scenario: Scenario
) -> list[PredictedStep]:
    """Return a row for each number of nodes and each strategy.

    plans : by the strategy's name, from ``message_plans``. Raises UserError on values out of range.
    """
    for count in nodes:
        if not 1 <= count <= LARGEST_NODES:
            raise UserError(f"--nodes: got {count}, give 1 to {LARGEST_NODES:,}")
    return [_row(name, plan, count, scenario) for count in nodes for name, plan in plans.items()]


def _row(name: str, asked: MessagePlan, nodes: int, scenario: Scenario) -> PredictedStep:
    """Return a strategy's row; ``asked`` is its plan, perhaps with automatic buckets."""
    network = scenario.network
    faster = scenario.faster_network
    compute = scenario.compute_at(nodes)
    sizes = scenario.calibration.gradient_sizes
    ranks = nodes * scenario.ranks_per_node
    plan = with_best_buckets(asked, sizes, ranks, network=network, compute=compute)
    step = predict_step(plan, sizes, ranks, network=network, compute=compute)

    def seconds_on(nodes: int, network: Network, compute: StepCompute) -> float:
        ranks = nodes * scenario.ranks_per_node
        best = with_best_buckets(asked, sizes, ranks, network=network, compute=compute)
        return step_seconds(best, sizes, ranks, network=network, compute=compute)

    seconds = step.step_seconds
    speedup = seconds_on(1, network, scenario.compute_at(1)) / seconds
    doubled = min(2 * nodes, LARGEST_NODES)
    more_samples = 1.0
    if scenario.scaling == "weak":
        speedup *= nodes
        more_samples = doubled / nodes
    doubled_seconds = seconds_on(doubled, network, scenario.compute_at(doubled))
    at_once = scenario.compute_at(nodes, network=faster)
    gains = {
        "network": seconds / seconds_on(nodes, faster, at_once),
        "compute": seconds / seconds_on(nodes, network, times(compute, 0.5)),
        "nodes": more_samples * seconds / doubled_seconds,
        "no messages": seconds / compute.seconds,
    }
    notes = [_note(name, nodes, scenario)]
    if plan is not asked:
        notes.insert(0, _buckets_text(name, plan))
    note = "; ".join(filter(None, notes))
    return PredictedStep(
        name, nodes, scenario.ranks_per_node, step, speedup, speedup / nodes, gains, note
    )


def _note(name: str, nodes: int, scenario: Scenario) -> str:
    """Return the condition under which a row holds; "" if there is none."""
    ranks = nodes * scenario.ranks_per_node
    if name == "none" and ranks > 1:
        return _NO_EXCHANGE
    least = scenario.least_samples
    if scenario.scaling == "strong" and ranks * least > scenario.batch_size:
        owner = "node" if scenario.ranks_per_node == 1 else "rank"
        if scenario.accumulation_steps > 1:
            owner = "micro-batch"
        needs = f"each {owner} needs a sample"
        if least > scenario.accumulation_steps:
            needs = f"BatchNorm needs {least // scenario.accumulation_steps} samples a {owner}"
        return f"predicted for a global batch of {ranks * least:,}: {needs}"
    cores = scenario.calibration.cores
    if scenario.on_one_machine and ranks > cores:
        return f"{ranks} ranks share {cores} cores: outside the measured range"
    return ""


def _buckets_text(name: str, plan: MessagePlan) -> str:
    """Return which buckets an automatic choice took."""
    size = getattr(plan, "bucket_mb", None)
    if size is None:
        return f"{name} takes the default buckets"
    return f"{name} takes buckets of {size:g} MiB"


def scaling_limits_of(plans: Mapping[str, MessagePlan], scenario: Scenario) -> list[ScalingLimit]:
    """Return how far each strategy scales with a global batch, then with a batch for each rank.

    Empty if all ranks share one machine: its cores limit them.
    """
    if scenario.on_one_machine:
        return []
    found = []
    for scaling in SCALINGS:
        scaled = replace(scenario, scaling=scaling)
        found += scaling_limits(
            plans,
            scenario.calibration.gradient_sizes,
            network=scaled.network,
            batch_size=scaled.batch_size,
            scaling=scaling,
            compute_at=scaled.compute_at,
            least_samples=scaled.least_samples,
        )
    return found
