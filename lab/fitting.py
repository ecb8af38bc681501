"""Least-squares fits of measured times, with 95 % intervals.

``fit`` minimises relative errors, so that small and large messages weigh the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear
from scipy.stats import t as students_t


@dataclass(frozen=True)
class Fit:
    """Fitted ``values``, their 95 % ``intervals`` and the largest relative error of a point."""

    values: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]
    worst_relative_error: float
    # Each point: the varied quantity (bytes, samples), measured seconds, fitted seconds.
    points: tuple[tuple[float, float, float], ...]


def fit(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    varied: Sequence[float],
    known: Sequence[float] | None = None,
) -> Fit:
    """Return the non-negative values that fit ``seconds`` best as ``known`` + sum(value * column).

    columns : one sequence per value, with one entry per measurement
    seconds, varied, known : one entry per measurement; ``known`` is 0 if not given

    The intervals are those of the linear model (Student's t over the relative residuals), cut at 0.
    """
    measured = np.asarray(seconds, dtype=float)
    matrix = np.asarray(columns, dtype=float).T / measured[:, None]
    target = (measured - (0.0 if known is None else np.asarray(known, dtype=float))) / measured
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    values = lsq_linear(scaled, target, bounds=(0, np.inf)).x
    residuals = scaled @ values - target
    freedom = len(measured) - len(values)
    half = np.full(len(values), np.inf)
    if freedom > 0:
        covariance = np.linalg.pinv(scaled.T @ scaled) * (residuals @ residuals) / freedom
        half = students_t.ppf(0.975, freedom) * np.sqrt(np.diag(covariance))
    lows, highs = ((values - half) / scale).tolist(), ((values + half) / scale).tolist()
    return Fit(
        tuple((values / scale).tolist()),
        tuple((max(0.0, low), high) for low, high in zip(lows, highs, strict=True)),
        float(np.abs(residuals).max()),
        tuple(
            zip(
                map(float, varied),
                measured.tolist(),
                (measured * (1 + residuals)).tolist(),
                strict=True,
            )
        ),
    )
