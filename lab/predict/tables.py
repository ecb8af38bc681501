"""The arithmetic of ``lab predict``: steps and scaling limits of a scenario. Imports no torch.

``message_plans`` returns what strategies send, ``predict_table`` the time of their steps on given
numbers of nodes, and ``scaling_limits_of`` how far each strategy scales; printing.py and plots.py
show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.plans.base import MessagePlan, NoSyncPlan
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
from lab.predict.scaling import SCALINGS, ScalingLimit, base_plan, scaling_limits
from lab.predict.scenario import Scenario
from lab.predict.sentences import sentence
from lab.predict.variants import split_variant

# What a reader may buy, by scaling: of nodes with a batch of their own, more are no faster step.
PURCHASES = {"strong": ("network", "compute", "nodes"), "weak": ("network", "compute")}

INTERVAL = (0.1, 0.9)  # quantiles of the draws


@dataclass(frozen=True)
class PredictedStep:
    """One strategy's step on ``nodes`` nodes with ``ranks_per_node`` ranks each.

    ``speedup`` is relative to one node, of the fastest strategy there (``scaling.base_plan``); in
    weak scaling it compares samples per second.
    ``efficiency`` = speedup / nodes. ``gains`` : how many times as many samples per second a change
    brings: "network", "compute" or "nodes" doubled, and "no messages". ``note`` states the
    condition under which the row holds, ``caveat`` what it leaves out (``MessagePlan.caveat``).

    ``low_seconds`` and ``high_seconds`` are the ends of the step's 80 % interval, ``speedup_range``
    and ``gain_ranges`` those of the speed-up and the gains. ``best_shares`` : in which share of the
    draws each of ``PURCHASES`` gains most.
    """

    sync: str
    nodes: int
    ranks_per_node: int
    prediction: StepPrediction
    speedup: float
    efficiency: float
    gains: Mapping[str, float]
    low_seconds: float
    high_seconds: float
    speedup_range: tuple[float, float]
    gain_ranges: Mapping[str, tuple[float, float]]
    best_shares: Mapping[str, float]
    note: str = ""
    caveat: str = ""


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
    drawn = scenario.drawn()
    alone = [_plan_on(1, plan, scenario) for plan in plans.values()]
    base = base_plan(alone, lambda plan: _seconds(plan, 1, scenario))
    return [
        _row(name, plan, count, scenario, drawn, base)
        for count in nodes
        for name, plan in plans.items()
    ]


def _intervals(draws: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return ``interval`` of each value, all at once, since that is faster."""
    in_each_draw = np.array(np.broadcast_arrays(*draws.values()))
    lows, highs = np.quantile(in_each_draw, INTERVAL, axis=-1).tolist()
    return dict(zip(draws, zip(lows, highs, strict=True), strict=True))


def interval(draws: Any) -> tuple[float, float]:
    """Return the ends of the 80 % interval of draws; of a number that is certain, itself twice."""
    low, high = np.quantile(draws, INTERVAL)
    return float(low), float(high)


def _row(
    name: str,
    asked: MessagePlan,
    nodes: int,
    scenario: Scenario,
    drawn: Scenario,
    base: MessagePlan,
) -> PredictedStep:
    """Return a strategy's row.

    asked : its plan, perhaps with automatic buckets. base : see ``scaling.base_plan``.
    """
    if isinstance(asked, NoSyncPlan):
        base = asked
    network = scenario.network
    compute = scenario.compute_at(nodes)
    sizes = scenario.calibration.gradient_sizes
    ranks = nodes * scenario.ranks_per_node
    plan = with_best_buckets(asked, sizes, ranks, network=network, compute=compute)
    step = predict_step(plan, sizes, ranks, network=network, compute=compute)
    plans = {count: _plan_on(count, asked, scenario) for count in (nodes, _doubled(nodes))}
    alone = _seconds(base, 1, scenario)
    alone_drawn = _seconds(base, 1, drawn)
    gains = _gains(plans, nodes, scenario, step.step_seconds)
    right_drawn = _seconds(plans[nodes], nodes, drawn)
    gains_drawn = _gains(plans, nodes, drawn, right_drawn)
    seconds_drawn = right_drawn * drawn.remainder
    more_samples = nodes if scenario.scaling == "weak" else 1
    speedup = more_samples * alone / step.step_seconds
    speedup_drawn = more_samples * alone_drawn / seconds_drawn
    ranges = _intervals(gains_drawn | {"step": seconds_drawn, "speedup": speedup_drawn})
    if ranks == 1:
        ranges["step"] = (step.step_seconds, step.step_seconds)
    if nodes == 1 and speedup == 1.0:
        ranges["speedup"] = (1.0, 1.0)
    low, high = ranges["step"]
    notes = [_note(name, nodes, scenario)]
    if plan is not asked:
        notes.insert(0, _buckets_text(name, plan))
    return PredictedStep(
        sync=name,
        nodes=nodes,
        ranks_per_node=scenario.ranks_per_node,
        prediction=step,
        speedup=speedup,
        efficiency=speedup / nodes,
        gains=gains,
        low_seconds=low,
        high_seconds=high,
        speedup_range=ranges["speedup"],
        gain_ranges={change: ranges[change] for change in gains_drawn},
        best_shares=_best_shares(gains_drawn, PURCHASES[scenario.scaling]),
        note="; ".join(filter(None, notes)),
        caveat=plan.caveat if ranks > 1 else "",
    )


def _best_shares(gains: Mapping[str, Any], purchases: Sequence[str]) -> dict[str, float]:
    """Return the share of the draws in which each purchase gains most."""
    in_each_draw = np.array(np.broadcast_arrays(*(gains[purchase] for purchase in purchases)))
    best = in_each_draw.argmax(axis=0)
    return {purchase: float(np.mean(best == index)) for index, purchase in enumerate(purchases)}


def main_step(steps: Sequence[PredictedStep]) -> PredictedStep | None:
    """Return the step of ddp on the most nodes, or of the fastest strategy there that exchanges.

    None if there is none, or only one node.
    """
    most = max(step.nodes for step in steps)
    rows = [step for step in steps if step.nodes == most and step.sync != "none"]
    if most == 1 or not rows:
        return None
    return min(rows, key=lambda row: (row.sync != "ddp", -row.speedup))


def _doubled(nodes: int) -> int:
    return min(2 * nodes, LARGEST_NODES)


def _plan_on(nodes: int, asked: MessagePlan, scenario: Scenario) -> MessagePlan:
    """Return the plan with the best buckets for that number of nodes, if it asks for them."""
    return with_best_buckets(
        asked,
        scenario.calibration.gradient_sizes,
        nodes * scenario.ranks_per_node,
        network=scenario.network,
        compute=scenario.compute_at(nodes),
    )


def _seconds(
    plan: MessagePlan,
    nodes: int,
    scenario: Scenario,
    *,
    network: Network | None = None,
    compute: StepCompute | None = None,
) -> Any:
    """Return the seconds of a step, or of each draw; None: as in the scenario."""
    return step_seconds(
        plan,
        scenario.calibration.gradient_sizes,
        nodes * scenario.ranks_per_node,
        network=network or scenario.network,
        compute=compute or scenario.compute_at(nodes),
    )


def _gains(
    plans: Mapping[int, MessagePlan], nodes: int, scenario: Scenario, seconds: Any
) -> dict[str, Any]:
    """Return ``PredictedStep.gains`` of a step of so many seconds; ``plans`` are by nodes."""
    plan = plans[nodes]
    compute = scenario.compute_at(nodes)
    faster = scenario.faster_network
    at_once = scenario.compute_at(nodes, network=faster)
    doubled = _doubled(nodes)
    more_samples = doubled / nodes if scenario.scaling == "weak" else 1.0
    return {
        "network": seconds / _seconds(plan, nodes, scenario, network=faster, compute=at_once),
        "compute": seconds / _seconds(plan, nodes, scenario, compute=times(compute, 0.5)),
        "nodes": more_samples * seconds / _seconds(plans[doubled], doubled, scenario),
        "no messages": seconds / compute.seconds,
    }


def _note(name: str, nodes: int, scenario: Scenario) -> str:
    """Return the condition under which a row holds; "" if there is none."""
    ranks = nodes * scenario.ranks_per_node
    if name == "none" and ranks > 1:
        return sentence("no_exchange")
    least = scenario.least_samples
    if scenario.scaling == "strong" and ranks * least > scenario.batch_size:
        owner = "node" if scenario.ranks_per_node == 1 else "rank"
        if scenario.accumulation_steps > 1:
            owner = "micro-batch"
        needs = sentence("needs_sample", owner=owner)
        if least > scenario.accumulation_steps:
            samples = least // scenario.accumulation_steps
            needs = sentence("needs_samples", samples=samples, owner=owner)
        return sentence("larger_batch", batch=f"{ranks * least:,}", needs=needs)
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
