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


def fit(beliefs: Beliefs, cells: Sequence[MeasuredStep]) -> Beliefs:
    """Return what is known of the priors after these measurements.

    What of the steps no such cluster explains counts as noise, too, in how sure the result is.
    """
    count = len(beliefs.priors)
    before = np.linalg.inv(beliefs.root @ beliefs.root.T)  # precision
    measured = np.array([cell.log_measured for cell in cells])
    z = beliefs.mean
    precision = before
    # Column 0 is z, the others differ from it in one prior each.
    changes = _DIFFERENCE * np.eye(count, count + 1, 1)
    for _ in range(_ROUNDS):
        steps = np.array([cell.log_steps(beliefs, z[:, None] + changes) for cell in cells])
        slopes = (steps[:, 1:] - steps[:, :1]) / _DIFFERENCE
        off = measured - steps[:, 0]
        weighted = slopes.T / MEASURED_NOISE**2
        pull = weighted @ off - before @ (z - beliefs.mean)
        move = np.linalg.solve(before + weighted @ slopes, pull)
        z = z + np.clip(move, -_FARTHEST, _FARTHEST)
        noise = max(MEASURED_NOISE, float(np.std(off)))
        precision = before + slopes.T @ slopes / noise**2
    return replace(beliefs, mean=z, root=np.linalg.cholesky(np.linalg.inv(precision)))
