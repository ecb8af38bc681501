"""What ``lab predict`` predicts of a state of the page of ``lab whatif``."""

from lab.predict.calibration_file import Calibration
from lab.predict.cli import GRADIENT_BYTES
from lab.predict.cluster import TypicalCluster, typical_latency
from lab.predict.own_model import with_gradient_bytes, with_own_model
from lab.predict.scenario import Scenario
from lab.predict.tables import PredictedStep, message_plans, predict_table
from lab.whatif.data import State


def steps_of(state: State, calibration: Calibration) -> list[PredictedStep]:
    """Return a row of ``lab predict`` for each of the state's strategies."""
    options = {"bucket_mb": state.bucket_mb, "ranks_per_node": state.ranks_per_node}
    plans = message_plans(state.strategies, options)
    return predict_table([state.nodes], plans, scenario_of(state, calibration))


def scenario_of(state: State, calibration: Calibration) -> Scenario:
    """Return what ``lab predict`` predicts with the flags of this state."""
    step_seconds = _in_units(state.step_ms, 1e-3)
    samples = None if step_seconds is None else state.batch
    model: str | None = state.model
    parameters = None
    if model == "own":
        model = None
        parameters = state.parameters
    of_model = with_own_model(
        calibration, model=model, parameters=parameters, step_seconds=step_seconds, batch=samples
    )
    rate_bits = 1e9 * state.rate_gbit
    latency = _in_units(state.latency_us, 1e-6)
    cluster = None
    if state.costs == "typical":
        cluster = TypicalCluster.of(state.backend, state.transport)
    elif latency is None:
        latency = typical_latency(rate_bits)
    inside_bits = None
    if state.ranks_per_node > 1:
        inside_bits = _in_units(state.inside_gbit, 1e9)
    return Scenario(
        calibration=with_gradient_bytes(of_model, GRADIENT_BYTES[state.gradient_type]),
        batch_size=state.batch_size,
        scaling=state.scaling,
        rate_bits=rate_bits,
        latency_seconds=latency,
        ranks_per_node=state.ranks_per_node,
        inside_bits=inside_bits,
        own_nodes=step_seconds is not None,
        cluster=cluster,
        step_seconds=step_seconds,
        step_samples=samples,
    )


def _in_units(value: float | None, unit: float) -> float | None:
    """Return a value times its unit; None for None."""
    if value is None:
        return None
    return value * unit
