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
    unknown = measured
    if known is not None:
        unknown = measured - np.asarray(known, dtype=float)
    # Each measurement is divided by its seconds, so that residuals are relative errors.
    matrix = np.asarray(columns, dtype=float).T / measured[:, None]
    target = unknown / measured
    # Columns of equal size: messages and bytes differ by many orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    values = lsq_linear(scaled, target, bounds=(0, np.inf)).x
    residuals = scaled @ values - target
    half = _half_widths(scaled, residuals)
    lows = np.maximum(0.0, (values - half) / scale)
    highs = (values + half) / scale
    fitted = measured * (1 + residuals)
    return Fit(
        values=tuple((values / scale).tolist()),
        intervals=tuple(zip(lows.tolist(), highs.tolist(), strict=True)),
        worst_relative_error=float(np.abs(residuals).max()),
        points=tuple(zip(map(float, varied), measured.tolist(), fitted.tolist(), strict=True)),
    )


def _half_widths(matrix: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """Return half of each value's 95 % interval; infinite without a spare measurement.

    matrix : of shape (measurements, values). residuals : of shape (measurements,).
    """
    measurements, values = matrix.shape
    freedom = measurements - values
    if freedom <= 0:
        return np.full(values, np.inf)
    covariance = np.linalg.pinv(matrix.T @ matrix) * (residuals @ residuals) / freedom
    return students_t.ppf(0.975, freedom) * np.sqrt(np.diag(covariance))
