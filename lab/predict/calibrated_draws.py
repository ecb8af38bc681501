"""How uncertain a calibrated network is: draws from the intervals of its fits. Imports no torch."""

from dataclasses import replace
from typing import Any

from lab.predict.calibration_file import Calibration
from lab.predict.event_model import Network, Rate, larger
from lab.predict.priors import normal_draws

# Steps measured on emulated nodes are within 5 % of those predicted (benchmarks/cost-model.md).
REMAINDER = 0.04
_IN_95 = 1.96  # standard deviations from the mean to the end of a 95 % interval


def drawn_remainder() -> Any:
    """Return draws of measured over predicted step where the calibration is right."""
    _, _, remainder = normal_draws(3)
    return 1 + REMAINDER * remainder


def spreads(calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Return the standard deviations of each kind's alpha and beta, from its fit's intervals."""
    found = {}
    for kind in calibration.network.kinds:
        alpha, beta = (
            (high - low) / (2 * _IN_95) for low, high in calibration.fits[kind].intervals[:2]
        )
        found[kind] = (alpha, beta)
    return found


def drawn_network(calibration: Calibration) -> Network:
    """Return draws of the calibrated network: software is slow, or fast, for all kinds at once."""
    network = calibration.network
    alpha_draws, beta_draws, _ = normal_draws(3)
    kinds = {}
    for kind, (alpha, beta) in spreads(calibration).items():
        rate = network.kinds[kind]
        kinds[kind] = Rate(
            larger(0.0, rate.alpha_seconds + alpha * alpha_draws),
            larger(0.0, rate.beta_seconds_per_byte + beta * beta_draws),
            rate.floor_seconds,
            rate.start_seconds,
        )
    return replace(network, kinds=kinds)
