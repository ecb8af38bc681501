"""The arithmetic of ``lab predict``: steps and scaling limits for nodes nobody has, from a calibration. No torch is imported.

``message_plans`` says what strategies send, ``predict_table`` what their steps take on given numbers of nodes,
``scaling_limits_of`` how far each strategy scales at all; printing.py and plots.py show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.cost_model.calibration_file import Calibration
from common.cost_model.compute_model import LEAST_SAMPLES, StepCompute, local_samples
from common.cost_model.event_model import LARGEST_NODES, Network, Prediction, predict_step
from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.message_plans import MessagePlan
from lab.predict.scaling import SCALINGS, ScalingLimit, scaling_limits

_NO_EXCHANGE = "no exchange: each node trains a model of its own"


@dataclass(frozen=True)
class PredictedStep:
    """One strategy's step on ``nodes`` nodes; ``prediction`` is None where the strategy has no formula, ``speedup`` over one
    node (in weak scaling: of samples a second), ``efficiency`` = speedup / nodes; ``note`` says on which condition it holds."""

    sync: str
    nodes: int
    prediction: Prediction | None
    speedup: float | None
    efficiency: float | None
    note: str = ""


def message_plans(
    names: Sequence[str], options: Mapping[str, Any] | None = None
) -> dict[str, MessagePlan]:
    """Return the plans of these strategies by name, built with those of ``options`` that each takes. UserError with the
    choices where a name is unknown."""
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise UserError(
            f"--sync: got {', '.join(unknown)}, choose from {', '.join(STRATEGIES)}, or all"
        )
    return {name: build_message_plan_from(name, options or {}) for name in names}


def network_of(
    calibration: Calibration, rate_bits: float | None, latency_seconds: float | None
) -> Network:
    """Return the network to predict for: the calibration's, or other links under the same software."""
    return calibration.network.over(rate_bits=rate_bits, latency_seconds=latency_seconds)


def compute_of(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> StepCompute:
    """Return a rank's step among ``nodes``: each on a machine of its own, or all on the one that was calibrated."""
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

    plans : by the strategy's name, from ``message_plans``. Without rate and latency the ranks stand where the calibration's
    did: those of one over loopback share its machine. Raises UserError on values out of range.
    """
    for count in nodes:
        if not 1 <= count <= LARGEST_NODES:
            raise UserError(f"--nodes: got {count}, give 1 to {LARGEST_NODES:,}")
    if scaling not in SCALINGS:
        raise UserError(f"--scaling: got {scaling!r}, choose {' or '.join(SCALINGS)}")
    if batch_size < LEAST_SAMPLES:
        raise UserError(f"--batch-size: got {batch_size}, give {LEAST_SAMPLES} or more")
    own_machines = rate_bits is not None or latency_seconds is not None
    network = network_of(calibration, rate_bits, latency_seconds)
    compute_at = partial(
        compute_of,
        calibration,
        batch_size=batch_size,
        scaling=scaling,
        own_machines=own_machines,
    )
    alone, rows = compute_at(1).seconds, []
    for count in nodes:
        compute = compute_at(count)
        note = _note(
            calibration, count, batch_size=batch_size, scaling=scaling, own_machines=own_machines
        )
        for name, plan in plans.items():
            try:
                prediction = predict_step(
                    plan, calibration.gradients, count, network=network, compute=compute
                )
            except NotImplementedError:
                rows.append(PredictedStep(name, count, None, None, None, "no formula"))
                continue
            ratio = alone / prediction.step_seconds
            speedup = count * ratio if scaling == "weak" else ratio
            own_note = _NO_EXCHANGE if name == "none" and count > 1 else note
            rows.append(PredictedStep(name, count, prediction, speedup, speedup / count, own_note))
    return rows


def scaling_limits_of(
    plans: Mapping[str, MessagePlan],
    calibration: Calibration,
    rate_bits: float | None,
    latency_seconds: float | None,
    batch_size: int,
) -> list[ScalingLimit]:
    """Return how far each strategy scales with a global batch of that size, then with one a node.

    Empty without rate and latency for a calibration over loopback: the ranks of one machine end with its cores.
    """
    own_machines = rate_bits is not None or latency_seconds is not None
    if not own_machines and calibration.over_loopback:
        return []
    network = network_of(calibration, rate_bits, latency_seconds)
    return [
        limit
        for scaling in SCALINGS
        for limit in scaling_limits(
            plans,
            calibration.gradients,
            network=network,
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
        return f"global batch {nodes * LEAST_SAMPLES:,}: BatchNorm needs two samples a node"
    if not own_machines and calibration.over_loopback and nodes > calibration.cores:
        return f"{nodes} ranks share {calibration.cores} cores: beyond what was measured"
    return ""
