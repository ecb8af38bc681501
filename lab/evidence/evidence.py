"""How often each rank's own gradient counts in what each rank's optimiser got."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.utils.gradient_fit import EXACT, ROUNDED, SAME, Numbers, fit_ranks

# Of what a rank got a multiple; "none" of nothing, or of nothing else in this list.
Gradient = Literal["the mean", "its own", "another rank's own", "none"]

# Below it a weight is zero in any precision; float16's smallest number over its greatest is 1e-12.
_NOTHING = 1e-13


class Source(NamedTuple):
    """What one rank got.

    factor : the multiple of ``gradient``; 0 if it is a multiple of none.
    text : in words.
    """

    gradient: Gradient
    factor: float
    text: str


@dataclass(frozen=True)
class Evidence:
    """How what the ranks got comes from the ranks' own gradients.

    weights : (ranks, ranks); row r says how often each rank's own gradient counts in what rank r
        got; NaN where that is no such sum.
    residue : the greatest relative error of these sums, in the worst parameter.
    nearest : the sums that come nearest, as a multiple of the mean.
    rounded : whether there are gradients of 16 bits.
    samples : by rank, on how many samples its gradient was computed, where all are known.
    groups : the ranks of each group that exchanges tensors, where that is known.
    """

    weights: Numbers
    residue: float = 0.0
    nearest: float = np.nan
    rounded: bool = False
    samples: Sequence[int] = ()
    groups: Collection[frozenset[int]] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.weights)

    @property
    def misfit(self) -> float:
        """The greatest error of a sum that explains what a rank got."""
        return ROUNDED if self.rounded else EXACT

    @property
    def tolerance(self) -> float:
        """How far from 1 a multiple of the mean may be that is the mean itself."""
        return SAME if self.rounded else SAME / 10

    @cached_property
    def explained(self) -> NDArray[np.bool_]:
        """By rank, whether it got a weighted sum of the ranks' gradients."""
        known = np.asarray(np.isfinite(self.weights).all(axis=1))
        if known.all() and self.residue > self.misfit:
            return ~known
        return known

    @cached_property
    def sources(self) -> list[Source]:
        """By rank, what it got."""
        return [self._source(rank) for rank in range(self.size)]

    def _source(self, rank: int) -> Source:
        """Return what a rank got."""
        row = self.weights[rank]
        if not self.explained[rank]:
            return Source("none", 0.0, "no weighted sum of the ranks' gradients")
        greatest = np.abs(row).max()
        if greatest < _NOTHING:
            return Source("none", 0.0, "nothing")
        if np.ptp(row) <= SAME * greatest:
            return _multiple("the mean", float(row.sum()), "the mean")
        (counting,) = np.nonzero(np.abs(row) > SAME * greatest)
        if len(counting) > 1:
            shown = " ".join(f"{weight:.3f}" for weight in row.round(3) + 0.0)  # 0.0: no -0
            return Source("none", 0.0, f"weights {shown}")
        other = int(counting[0])
        if other == rank:
            return _multiple("its own", float(row[other]), "its own")
        return _multiple("another rank's own", float(row[other]), f"rank {other}'s own")

    @property
    def gradients(self) -> set[Gradient]:
        """Of what the ranks got multiples."""
        return {source.gradient for source in self.sources}

    @property
    def same_sum(self) -> bool:
        """Whether all ranks got the same sum."""
        apart = np.ptp(self.weights, axis=0).max()
        return bool(self.explained.all() and apart <= SAME * np.abs(self.weights).max())

    @property
    def factor(self) -> float:
        """The multiple of the mean that all ranks got; NaN if they got something else."""
        if not self.explained.all():
            return np.nan
        if not np.abs(self.weights).max() >= _NOTHING:
            return 0.0
        factors = [source.factor for source in self.sources]
        same = np.ptp(factors) <= self.tolerance * np.abs(factors).max()
        return float(np.mean(factors)) if same and self.gradients == {"the mean"} else np.nan

    @property
    def right(self) -> bool:
        """Whether every rank got the mean."""
        return abs(self.factor - 1) <= self.tolerance

    @property
    def rows(self) -> str:
        """What each rank got, in words."""
        return "; ".join(f"rank {rank} gets {it.text}" for rank, it in enumerate(self.sources))


def _multiple(gradient: Gradient, factor: float, name: str) -> Source:
    text = name if abs(factor - 1) < SAME else f"{factor:.3f} times {name}"
    return Source(gradient, factor, text)


def explain(
    own: Numbers,
    got: Numbers,
    *,
    columns: list[slice] | None = None,
    rounded: bool = False,
    samples: Sequence[int] = (),
    groups: Collection[frozenset[int]] = (),
) -> Evidence:
    """Return how what the ranks got comes from their own gradients.

    Parameters whose own gradients are rounding errors on all ranks tell nothing, so they are left
    out, unless there is no other.

    own, got : of shape (ranks, numbers). columns : those of each parameter, by default one.
    rounded, samples, groups : see ``Evidence``.
    """
    columns = columns or [slice(0, own.shape[1])]
    finite = np.isfinite(got).all(axis=1) & np.isfinite(own).all()
    if not finite.all():
        own = np.nan_to_num(own, posinf=0, neginf=0)
        got = np.nan_to_num(got, posinf=0, neginf=0)
    misfit = ROUNDED if rounded else EXACT
    found = fit_ranks(own, got, columns, misfit=misfit)
    nearest = float(found.weights.sum(axis=1).mean())
    explained = finite & (found.misfits <= misfit)
    weights = np.where(explained[:, None], found.weights, np.nan)
    return Evidence(weights, float(found.misfits.max()), nearest, rounded, samples, groups)


def explain_parameters(own: Numbers, got: Numbers, columns: list[slice]) -> list[Evidence]:
    """Return by parameter how what the ranks got comes from their own gradients there."""
    return [explain(own[:, at], got[:, at]) for at in columns]
