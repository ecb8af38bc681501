"""Fit what optimisers get by the gradients that the ranks computed (least squares).

``fit`` returns the weights of rows of numbers in other rows, and how far those sums are from them.
``fit_ranks`` does so for what each rank got and all ranks' own gradients. What the weights mean
(the mean, a sum, a rank's own gradient) ``lab.evidence`` says.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# The greatest misfit of a sum that explains what a rank got: that of float32 (measured: about
# 1e-7, and 1e-5 where numbers of very different size are added), and of 16-bit gradients.
EXACT = 1e-4
ROUNDED = 2e-2
# Weights, or multiples, whose difference is below this part of the greatest are the same. Ranks'
# gradients resemble each other, so a weight is known ten to a hundred times worse than the sum.
SAME = 1e-2
_TINY = 1e-300


class LinearFit(NamedTuple):
    """How the rows of ``got`` come from those of ``basis``.

    weights : (rows of got, rows of basis), with which weights @ basis is nearest to got.
    misfits : (rows of got,), the relative error of that sum in its worst parameter.
    """

    weights: Numbers
    misfits: Numbers


def fit(basis: Numbers, got: Numbers, columns: list[slice]) -> LinearFit:
    """Return the smallest weights with which weights @ basis is nearest to got, and the misfits.

    All parameters count alike. Gradients that are equal share their weight.

    basis, got : of shape (rows, numbers). columns : those of each parameter.
    """
    sizes = [np.linalg.norm(basis[:, at]) or np.inf for at in columns]
    balance = np.repeat(1 / np.array(sizes), [at.stop - at.start for at in columns])
    found = np.linalg.lstsq((basis * balance).T, (got * balance).T, rcond=1e-3)[0]
    weights = np.asarray(found.T, dtype=np.float64)
    return LinearFit(weights, misfits(basis, weights, got, columns))


def fit_ranks(
    own: Numbers, got: Numbers, columns: list[slice], *, misfit: float = EXACT
) -> LinearFit:
    """Return the weights of all ranks' own gradients in what each rank got, and the misfits.

    Where ranks computed nearly the same, several weights give one sum. A multiple of the mean or of
    one rank's gradient is then returned as such: a gradient itself before a multiple, the mean
    before the rank's own, and that before another rank's. Parameters that are not ``measurable``
    are left out, unless there is no other.

    own, got : of shape (ranks, numbers). misfit : the greatest error of a sum that explains a row.
    """
    kept = measurable(own, columns)
    if 0 < len(kept) < len(columns):
        numbers = np.concatenate([np.arange(columns[at].start, columns[at].stop) for at in kept])
        columns = side_by_side(columns[at].stop - columns[at].start for at in kept)
        own = own[:, numbers]
        got = got[:, numbers]
    fitted = fit(own, got, columns)
    size = len(own)
    mean = np.full(size, 1 / size)
    alone = np.eye(size)
    for rank in range(size):
        others = np.delete(alone, rank, axis=0)
        candidates = np.vstack([mean, alone[rank], others])
        found = _multiple_of_one(candidates, own, got[[rank]], columns, misfit)
        if found is not None:
            fitted.weights[rank] = found.weights[0]
            fitted.misfits[rank] = found.misfits[0]
    return fitted


def _multiple_of_one(
    candidates: Numbers, own: Numbers, got: Numbers, columns: list[slice], misfit: float
) -> LinearFit | None:
    """Return the multiple of a row of candidates that explains the one row got; None without any.

    The first candidate that fits without a factor comes first, then the first one with a factor.
    """
    first = None
    for candidate in candidates:
        gradient = candidate @ own
        factor = 1.0  # of zeros, that are got as zeros
        if gradient.any():
            factor = float(got[0] @ gradient / (gradient @ gradient))
        weights = factor * candidate[None]
        errors = misfits(own, weights, got, columns)
        if errors[0] > misfit:
            continue
        if abs(factor - 1) <= SAME:
            return LinearFit(weights, errors)
        first = first or LinearFit(weights, errors)
    return first


def measurable(own: Numbers, columns: list[slice]) -> NDArray[np.int64]:
    """Return which parameters' gradients are more than rounding errors of the greatest ones.

    A bias before BatchNorm has a true gradient of zero: what is computed there differs between
    ranks and tells nothing.
    """
    lengths = np.linalg.norm(norms(own, columns), axis=0)
    widths = np.array([at.stop - at.start for at in columns], dtype=np.int64)
    sizes = lengths / np.sqrt(np.maximum(widths, 1))
    return np.flatnonzero(sizes > 1e-6 * np.nanmax(sizes, initial=0.0))


def misfits(basis: Numbers, weights: Numbers, got: Numbers, columns: list[slice]) -> Numbers:
    """Return by row of ``got`` how far weights @ basis is from it, in the worst parameter.

    The scale is what is added up, so a sum that nearly cancels is not measured by what is left.
    """
    sizes = np.maximum(np.abs(weights) @ norms(basis, columns), norms(got, columns))
    apart = norms(weights @ basis - got, columns) / np.maximum(sizes, _TINY)
    return np.asarray(apart.max(axis=1, initial=0.0))


def as_matrix(rows: Sequence[Sequence[float] | None]) -> Numbers:
    """Return recorded weights, of shape (ranks, ranks), with NaN in each row that is None."""
    unknown = [np.nan] * len(rows)
    return np.array([unknown if row is None else row for row in rows], dtype=np.float64)


def is_mean(weights: Numbers, residue: float, *, rounded: bool = False) -> bool:
    """Return whether weights of all ranks' gradients in what each rank got are 1/N each.

    weights : (ranks, ranks), NaN where a rank got no such sum. residue : the sums' greatest
    misfit. rounded : whether there are gradients of 16 bits.
    """
    misfit = ROUNDED if rounded else EXACT
    tolerance = SAME if rounded else SAME / 10
    # A sum over ranks is known better than its parts; comparisons with NaN are false.
    alike = np.abs(weights * len(weights) - 1).max() <= SAME
    whole = np.abs(weights.sum(axis=1) - 1).max() <= tolerance
    return bool(residue <= misfit and alike and whole)


def norms(rows: Numbers, columns: list[slice]) -> Numbers:
    """Return the norm of each row in each parameter: shape (rows, parameters)."""
    lengths = [np.linalg.norm(rows[:, at], axis=1) for at in columns]
    return np.array(lengths, dtype=np.float64).reshape(len(columns), len(rows)).T


def side_by_side(widths: Iterable[int]) -> list[slice]:
    """Return the columns of parameters of which one follows another."""
    return [slice(int(start), int(stop)) for start, stop in pairwise(np.cumsum([0, *widths]))]
