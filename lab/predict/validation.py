"""How good predictions are on measured steps of other people's clusters. Imports no torch.

``validate`` predicts each row of a file of measurements, and ``scores`` says how good that is.
Priors that were fitted to a row's group know its answer, so that group is predicted by priors
fitted to all other groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from common.utils.grouping import grouped
from lab.predict.event_model import Network, loads, step_seconds
from lab.predict.fitting import Array, MeasuredStep, fit_each
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import PublishedStep, published_path, read_published
from lab.predict.scenario import typical_latency
from lab.predict.tables import interval

FIT_NOISE = 0.07  # of the logarithm of a step, between clusters with the same priors
OUTLIERS_AT = 5.0
_COMMON_GBIT = 7.0  # of a link whose rate is not stated: what groups on CloudLab measured


@dataclass(frozen=True)
class Scored:
    """A row with its prediction: seconds of the step, and of its 80 % interval.

    baselines : what simpler rules predict, by name.
    """

    row: PublishedStep
    predicted: float
    low: float
    high: float
    baselines: Mapping[str, float]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.row.measured_step_s - 1

    @property
    def inside(self) -> bool:
        """Whether the measured step lies in the interval."""
        return self.low <= self.row.measured_step_s <= self.high

    def as_json(self) -> dict[str, Any]:
        """Return the row's columns and the prediction."""
        return {
            **self.row.columns,
            **self.row.numbers,
            "predicted_step_s": self.predicted,
            "low_s": self.low,
            "high_s": self.high,
            "error": self.error,
        }


@dataclass(frozen=True)
class Score:
    """Scores of some rows; errors and shares are fractions.

    baselines : (median, 90th percentile) of the error of simpler rules, by name. pairs, in_order :
    pairs of strategies measured in one setting, and those in the right order.
    """

    rows: int
    median_error: float
    p90_error: float
    inside: float
    baselines: Mapping[str, tuple[float, float]]
    pairs: int
    in_order: int

    def as_json(self) -> dict[str, Any]:
        """Return the score with names."""
        baselines = {
            name: {"median_error": median, "p90_error": p90}
            for name, (median, p90) in self.baselines.items()
        }
        return {
            "rows": self.rows,
            "median_error": self.median_error,
            "p90_error": self.p90_error,
            "inside": self.inside,
            "pairs": self.pairs,
            "pairs_in_order": self.in_order / self.pairs if self.pairs else None,
            "baselines": baselines,
        }


def validate(
    rows: Sequence[PublishedStep], *, known: Sequence[PublishedStep] | None = None
) -> list[Scored]:
    """Predict each row, in order.

    known : rows that the priors were fitted to; None: those that come with the project. A group
        that is among them is predicted by priors fitted to the other groups, any other group by
        the priors of priors.toml.
    """
    if known is None:
        known = shipped_rows()
    frozen = Beliefs.of(load_priors())
    left_out = {}
    if {row.group for row in rows} & {row.group for row in known}:
        left_out = fitted_without_each(known)
    return [_scored(row, left_out.get(row.group, frozen)) for row in rows]


def _scored(row: PublishedStep, beliefs: Beliefs) -> Scored:
    cell = row.cell(beliefs)
    drawn = cell.scenario.drawn()
    steps = cell.predicted(drawn) * drawn.remainder
    low, high = interval(steps)
    return Scored(row, float(cell.predicted(cell.scenario)), low, high, _baselines(row, cell))


def score(scored: Sequence[Scored]) -> Score:
    """Return the scores of these rows."""
    errors = [abs(row.error) for row in scored]
    baselines = {}
    for name in scored[0].baselines:
        off = [abs(row.baselines[name] / row.row.measured_step_s - 1) for row in scored]
        baselines[name] = (_median(off), _p90(off))
    pairs, in_order = _pairs(scored)
    inside = float(np.mean([row.inside for row in scored]))
    return Score(len(scored), _median(errors), _p90(errors), inside, baselines, pairs, in_order)


def scores(scored: Sequence[Scored]) -> dict[str, Score]:
    """Return the scores of all rows, of each backend, and of each group in the file's order."""
    found = {"all": score(scored)}
    for backend in ("gloo", "nccl"):
        of_backend = [row for row in scored if row.row.backend == backend]
        if of_backend:
            found[backend] = score(of_backend)
    for group, of_group in grouped((row.row.group, row) for row in scored).items():
        name = f"group {group}" if group in found else group
        found[name] = score(of_group)
    return found


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _p90(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9))


def _pairs(scored: Sequence[Scored]) -> tuple[int, int]:
    """Return the pairs of strategies in one setting, and how many have the right order."""
    pairs = 0
    in_order = 0
    for of_setting in grouped((row.row.setting, row) for row in scored).values():
        for first, second in combinations(of_setting, 2):
            if first.row.strategy == second.row.strategy:
                continue
            pairs += 1
            measured = first.row.measured_step_s < second.row.measured_step_s
            in_order += measured == (first.predicted < second.predicted)
    return pairs, in_order


def _baselines(row: PublishedStep, cell: MeasuredStep) -> dict[str, float]:
    """Return the step by simpler rules: perfect scaling, an envelope's back, and links alone."""
    rate_bits = 1e9 * (row.rate_gbit or _COMMON_GBIT)
    beta = 8 / rate_bits
    nbytes = 1e6 * row.grad_megabytes
    kinds = ["all_reduce"]
    if row.strategy.startswith("gather_scatter"):
        kinds = ["gather", "scatter"]
    link_bytes = sum(loads(kind, nbytes, row.ranks)[1] for kind in kinds)
    alone = replace(cell.scenario, cluster=None, latency_seconds=typical_latency(rate_bits))
    links = step_seconds(
        cell.plan,
        alone.calibration.gradient_sizes,
        row.ranks,
        network=Network(typical_latency(rate_bits), beta),
        compute=alone.compute_at(row.nodes),
    )
    return {
        "perfect_scaling": row.own_seconds,
        "no_overlap_line_rate": row.own_seconds + link_bytes * beta,
        "overlap_line_rate": links,
    }


@cache
def shipped_rows() -> tuple[PublishedStep, ...]:
    """Return the measurements that come with the project."""
    return tuple(read_published(published_path()))


def fitted_to(rows: Sequence[PublishedStep]) -> Beliefs:
    """Return the priors around the values that fit these rows, with ranges as wide as before."""
    return _fitted(rows, [_weights(rows)])[0]


def fitted_without_each(rows: Sequence[PublishedStep]) -> dict[str, Beliefs]:
    """Return, for each group, the priors fitted to the rows of all other groups."""
    weights = _weights(rows)
    groups = list(dict.fromkeys(row.group for row in rows))
    weightings = []
    for group in groups:
        is_other = np.array([row.group != group for row in rows])
        weightings.append(weights * is_other)
    return dict(zip(groups, _fitted(rows, weightings), strict=True))


def _weights(rows: Sequence[PublishedStep]) -> Array:
    """Return how much each row counts.

    The rows of a group are not independent, so a group counts by the square root of its rows.
    """
    rows_of = Counter(row.group for row in rows)
    return np.array([rows_of[row.group] ** -0.5 for row in rows])


def _fitted(rows: Sequence[PublishedStep], weightings: Sequence[Array]) -> list[Beliefs]:
    before = Beliefs.of(load_priors(fitted=False))
    fits = fit_each(
        before,
        [row.cell(before) for row in rows],
        weightings=weightings,
        noise=FIT_NOISE,
        outliers_at=OUTLIERS_AT,
    )
    return [_around(found) for found in fits]


def _around(found: Beliefs) -> Beliefs:
    """Return priors around the fitted values: other clusters differ as much as before the fit."""
    moved = [prior.moved(z) for prior, z in zip(found.priors, found.mean, strict=True)]
    return Beliefs.of(tuple(moved))
