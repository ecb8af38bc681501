"""Fit what optimisers get by the gradients that the ranks computed (least squares).

``fit`` returns the weights of all ranks' own gradients in what each rank got, and how far that sum
is from it. What the weights mean (the mean, a sum, a rank's own gradient) ``lab.evidence`` says.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# The greatest misfit of a sum that explains what a rank got: that of float32 (measured: about
# 1e-7, and 1e-5 where numbers of very different size are added), and of 16-bit gradients.
EXACT = 1e-4
ROUNDED = 2e-2
_TINY = 1e-300


class Fit(NamedTuple):
    """How the rows of ``got`` come from those of ``basis``.

    weights : (rows of got, rows of basis), with which weights @ basis is nearest to got.
    misfits : (rows of got,), the relative error of that sum in its worst parameter.
    """

    weights: Numbers
    misfits: Numbers


def fit(basis: Numbers, got: Numbers, columns: list[slice]) -> Fit:
    """Return the smallest weights with which weights @ basis is nearest to got, and the misfits.

    All parameters count alike. Gradients that are equal share their weight.

    basis, got : of shape (rows, numbers). columns : those of each parameter.
    """
    sizes = [np.linalg.norm(basis[:, at]) or np.inf for at in columns]
    balance = np.repeat(1 / np.array(sizes), [at.stop - at.start for at in columns])
    found = np.linalg.lstsq((basis * balance).T, (got * balance).T, rcond=1e-3)[0]
    weights = np.asarray(found.T, dtype=np.float64)
    return Fit(weights, misfits(basis, weights, got, columns))


def misfits(basis: Numbers, weights: Numbers, got: Numbers, columns: list[slice]) -> Numbers:
    """Return by row of ``got`` how far weights @ basis is from it, in the worst parameter.

    The scale is what is added up, so a sum that nearly cancels is not measured by what is left.
    """
    sizes = np.maximum(np.abs(weights) @ norms(basis, columns), norms(got, columns))
    apart = norms(weights @ basis - got, columns) / np.maximum(sizes, _TINY)
    return np.asarray(apart.max(axis=1, initial=0.0))


def norms(rows: Numbers, columns: list[slice]) -> Numbers:
    """Return the norm of each row in each parameter: shape (rows, parameters)."""
    lengths = [np.linalg.norm(rows[:, at], axis=1) for at in columns]
    return np.array(lengths, dtype=np.float64).reshape(len(columns), len(rows)).T


def side_by_side(widths: Iterable[int]) -> list[slice]:
    """Return the columns of parameters of which one follows another."""
    return [slice(int(start), int(stop)) for start, stop in pairwise(np.cumsum([0, *widths]))]
