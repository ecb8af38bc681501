"""What measured steps say about the priors of their clusters. Imports no torch.

``fit`` is Bayes' rule for steps (``MeasuredStep``) whose logarithm is nearly linear in the priors'
z: the Gauss-Newton method for the most likely z.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.sync.plans.base import MessagePlan
from lab.predict.event_model import step_seconds
from lab.predict.priors import Beliefs
from lab.predict.scenario import Scenario

Array = NDArray[np.float64]

MEASURED_NOISE = 0.03  # of the logarithm of a step that is measured again on the same cluster
_ROUNDS = 5
_DIFFERENCE = 0.3  # in z, for the slopes
_FARTHEST = 1.5  # in z, in one round


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step of one strategy.

    scenario : with a ``cluster``.
    """

    scenario: Scenario
    plan: MessagePlan
    nodes: int
    measured_seconds: float

    @cached_property
    def log_measured(self) -> float:
        """The logarithm of the measured seconds."""
        return float(np.log(self.measured_seconds))

    def predicted(self, scenario: Scenario) -> Any:
        """Return the seconds of this step in a scenario like the cell's own: floats, or draws."""
        ranks = self.nodes * scenario.ranks_per_node
        return step_seconds(
            self.plan,
            scenario.calibration.gradient_sizes,
            ranks,
            network=scenario.network,
            compute=scenario.compute_at(self.nodes),
        )

    def log_steps(self, beliefs: Beliefs, z: Array) -> Array:
        """Return the logarithm of the predicted step at each column of ``z``, (priors, columns)."""
        cluster = self.scenario.cluster
        assert cluster is not None
        values = beliefs.at(z, cluster.backend, cluster.transport)
        scenario = replace(self.scenario, cluster=replace(cluster, values=values))
        steps = np.broadcast_to(self.predicted(scenario), z.shape[1:])
        return np.asarray(np.log(steps))


def fit(
    beliefs: Beliefs,
    cells: Sequence[MeasuredStep],
    *,
    noise: float = MEASURED_NOISE,
    outliers_at: float | None = None,
    weights: Sequence[float] | None = None,
    rounds: int = _ROUNDS,
    start: Array | None = None,
) -> Beliefs:
    """Return what is known of the priors after these measurements.

    Parameters
    ----------
    noise : standard deviation of the logarithm of a measured step around the predicted one.
    outliers_at : residual, in standard deviations, at which a cell no longer counts (Tukey's
        biweight): a cluster that is unlike all others then moves nothing. None: all count alike.
    weights : how much each cell counts; None: 1 each.
    start : z at which the search begins; None: the mean.
    """
    weighting = np.ones(len(cells)) if weights is None else np.array(weights)
    return fit_each(
        beliefs,
        cells,
        weightings=[weighting],
        noise=noise,
        outliers_at=outliers_at,
        rounds=rounds,
        start=start,
    )[0]


def fit_each(
    beliefs: Beliefs,
    cells: Sequence[MeasuredStep],
    *,
    weightings: Sequence[Array],
    noise: float,
    outliers_at: float | None = None,
    rounds: int = _ROUNDS,
    start: Array | None = None,
) -> list[Beliefs]:
    """Return a fit for each weighting of the cells, see ``fit``.

    They are independent of each other. Together they take little longer than one alone, because
    each cell is predicted for all of them at once.
    """
    count = len(beliefs.priors)
    before = np.linalg.inv(beliefs.root @ beliefs.root.T)  # precision
    measured = np.array([cell.log_measured for cell in cells])
    found = [beliefs.mean if start is None else start] * len(weightings)
    precisions = [before] * len(weightings)
    # Column 0 of a fit is its z, the others differ from it in one prior each.
    changes = _DIFFERENCE * np.eye(count, count + 1, 1)
    for _ in range(rounds):
        columns = np.concatenate([z[:, None] + changes for z in found], axis=1)
        logs = np.array([cell.log_steps(beliefs, columns) for cell in cells])
        for index, steps in enumerate(np.split(logs, len(weightings), axis=1)):
            slopes = (steps[:, 1:] - steps[:, :1]) / _DIFFERENCE
            residuals = measured - steps[:, 0]
            weight = weightings[index] / noise**2
            if outliers_at is not None:
                nearness = np.maximum(0.0, 1 - (residuals / (outliers_at * noise)) ** 2)
                weight = weight * nearness**2
            precision = before + slopes.T @ (weight[:, None] * slopes)
            pull = slopes.T @ (weight * residuals) - before @ (found[index] - beliefs.mean)
            change = np.clip(np.linalg.solve(precision, pull), -_FARTHEST, _FARTHEST)
            found[index] = found[index] + change
            precisions[index] = precision
    return [
        replace(beliefs, mean=z, root=np.linalg.cholesky(np.linalg.inv(precision)))
        for z, precision in zip(found, precisions, strict=True)
    ]
