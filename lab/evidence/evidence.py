"""How often each rank's own gradient counts in what each rank's optimiser got."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.say import ranks_text
from common.utils.gradient_fit import EXACT, ROUNDED, SAME, Numbers, fit_ranks, is_mean

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


class Odd(NamedTuple):
    """A rank whose gradient counts ``times`` as much as each other rank's."""

    rank: int
    times: float


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
            return _multiple("its own", float(row[other]), "its own gradient")
        return _multiple("another rank's own", float(row[other]), f"rank {other}'s gradient")

    @property
    def rows(self) -> str:
        """What each rank got, in words."""
        return "; ".join(f"rank {rank} gets {it.text}" for rank, it in enumerate(self.sources))

    @property
    def unexplained(self) -> str:
        """The ranks that got no such sum, e.g. "rank 1"."""
        return ranks_text([int(rank) for rank in np.flatnonzero(~self.explained)])

    # --- a multiple of the mean ---

    @cached_property
    def factor(self) -> float:
        """The multiple of the mean that all ranks got; NaN if they got something else."""
        if not self.explained.all():
            return np.nan
        if np.abs(self.weights).max() < _NOTHING:
            return 0.0
        factors = [source.factor for source in self.sources]
        same = np.ptp(factors) <= self.tolerance * np.abs(factors).max()
        if not same or self.gradients != {"the mean"}:
            return np.nan
        return float(np.mean(factors))

    @property
    def right(self) -> bool:
        """Whether every rank got the mean."""
        return is_mean(self.weights, self.residue, rounded=self.rounded)

    @property
    def divisor(self) -> float:
        """By what the sum of all gradients was divided."""
        return self.size / self.factor

    def group_sizes(self, divisor: float) -> tuple[int, ...]:
        """Return the size of a group that is the divisor, or two sizes whose product it is."""
        sizes = sorted({len(group) for group in self.groups} - {1})
        pairs = combinations_with_replacement(sizes, 2)
        for chosen in [*((size,) for size in sizes), *pairs]:
            if near(divisor, float(np.prod(chosen))):
                return chosen
        return ()

    def is_whole(self, divisor: float) -> bool:
        """Return whether a divisor is a whole number from 2 to 64, as may stand in a script.

        The greater it is, the nearer it must be: one number in ten is as near by chance.
        """
        apart = abs(divisor - np.round(divisor))
        return bool(1.5 < divisor < 64.5 and apart < min(SAME * divisor, 0.05))

    # --- one sum on all ranks ---

    @cached_property
    def same_sum(self) -> bool:
        """Whether all ranks got the same sum."""
        apart = np.ptp(self.weights, axis=0).max()
        return bool(self.explained.all() and apart <= SAME * np.abs(self.weights).max())

    @property
    def shares(self) -> Numbers:
        """How often each rank's gradient counts in that sum."""
        return np.asarray(self.weights.mean(axis=0))

    @property
    def shares_text(self) -> str:
        """The shares, in words."""
        return ", ".join(f"{share:.4f}" for share in self.shares)

    @property
    def counting(self) -> list[int]:
        """The ranks whose gradients count in any rank's sum."""
        greatest = np.abs(self.weights).max(axis=0)
        return [int(rank) for rank in np.flatnonzero(greatest > SAME * greatest.max())]

    @property
    def left_out(self) -> str:
        """The gradients that do not count, and a verb."""
        missing = [rank for rank in range(self.size) if rank not in self.counting]
        if len(missing) == 1:
            return f"rank {missing[0]}'s own gradient is"
        return f"the gradients of {ranks_text(missing)} are"

    @property
    def odd(self) -> Odd | None:
        """The one rank that counts otherwise than the others do alike; None without such a one."""
        if not self.same_sum:
            return None
        usual = float(np.median(self.shares)) if self.size > 2 else float(self.shares.min())
        limit = SAME * np.abs(self.shares).max()
        odd = np.flatnonzero(np.abs(self.shares - usual) > limit)
        if len(odd) != 1 or abs(usual) <= limit:
            return None
        return Odd(int(odd[0]), float(self.shares[odd[0]]) / usual)

    # --- groups of different sizes that count alike in one sum ---

    @cached_property
    def uneven_sizes(self) -> list[int]:
        """By rank the size of its group; nothing if each group does not count alike.

        In a mean of the groups' means a rank of a group of n counts 1/n as often.
        """
        if not self.same_sum or self.shares.min() <= SAME * self.shares.max():
            return []
        known = {len(group) for group in self.groups} | {1}
        for number in range(2, self.size):  # of groups
            exact = self.shares.sum() / (number * self.shares)
            sizes = [int(size) for size in exact.round()]
            whole = np.abs(exact - exact.round()).max() < SAME
            counts = Counter(sizes)
            if not whole or len(counts) < 2 or not known.issuperset(counts):
                continue
            if all(count % size == 0 for size, count in counts.items()):
                return sizes
        return []

    @property
    def groups_total(self) -> float:
        """The weight of each group's mean: 1/groups in their mean; NaN if there are none."""
        if not self.uneven_sizes:
            return np.nan
        number = sum(1 / size for size in self.uneven_sizes)  # of groups
        return float(self.shares.sum()) / number

    @property
    def group_counts(self) -> str:
        """How often a rank of each size of a group counts, in words."""
        counts = []
        for size in sorted(set(self.uneven_sizes), reverse=True):
            ranks = [rank for rank, other in enumerate(self.uneven_sizes) if other == size]
            share = self.shares[ranks].mean()
            counts.append(f"{share:.4f} times in a group of {size} ({ranks_text(ranks)})")
        return "; ".join(counts)

    # --- different sums ---

    @cached_property
    def gradients(self) -> set[Gradient]:
        """Of what the ranks got multiples."""
        return {source.gradient for source in self.sources}

    @property
    def one_gradient_each(self) -> bool:
        """Whether each rank got a multiple of one rank's gradient, or of the mean."""
        return "none" not in self.gradients

    @property
    def having(self) -> frozenset[int]:
        """The ranks that got the mean, or a multiple."""
        ranks = enumerate(self.sources)
        return frozenset(rank for rank, source in ranks if source.gradient == "the mean")

    @property
    def having_mean(self) -> str:
        """The ranks that got the mean, in words."""
        return ranks_text(sorted(self.having))

    @cached_property
    def inside(self) -> list[list[int]]:
        """Groups that share the ranks out, so that each rank got its group's sum, in equal parts.

        Nothing if there are none.
        """
        weights = self.weights
        counts = weights > SAME * weights.max()
        groups = sorted({tuple(np.flatnonzero(row).tolist()) for row in counts})
        members = sorted(rank for group in groups for rank in group)
        expected = counts * np.diagonal(weights)[:, None]
        alike = np.abs(weights - expected).max() <= SAME * weights.max()
        if members != list(range(self.size)) or not np.diagonal(counts).all() or not alike:
            return []
        return [list(group) for group in groups]

    @property
    def inside_text(self) -> str:
        """The groups, in words."""
        return "; ".join(ranks_text(group) for group in self.inside)

    @property
    def of_its_group(self) -> str:
        """What a rank got of its group, in words."""
        times = self.weights.sum(axis=1)
        if np.abs(times - 1).max() <= SAME:
            return "the mean"
        return " or ".join(sorted({f"{part:.3f} times the mean" for part in times}))


def near(value: float, right: float) -> bool:
    """Return whether a number is ``right``, up to what a weight's error allows."""
    return abs(value - right) < SAME * abs(right)


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
