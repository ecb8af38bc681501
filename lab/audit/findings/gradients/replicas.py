"""The ranks' weights before each step, and how far they are apart."""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from lab.audit.findings.gradients.combination import parameter_rows
from lab.audit.findings.where import first_step_apart, lasting_optimizers
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Numbers, RankRecords, Recording

SAME = 1e-6
"""Weights that differ by less than this, relatively to a parameter's norm, are rounded."""


@dataclass(frozen=True)
class Replicas:
    """The weights of one optimiser's parameters on all ranks.

    Parameters
    ----------
    optimizer : its number in the records.
    names : of the parameters.
    limits : the column at which each parameter ends.
    values : by number of updates, an array of shape (ranks, columns): the weights after them.
    """

    optimizer: int
    names: tuple[str, ...]
    limits: tuple[int, ...]
    values: dict[int, Numbers]

    def spread(self, step: int) -> Numbers:
        """Return by parameter how far the ranks' weights are apart, relatively to their norm."""
        values = self.values[step]
        found = []
        for start, stop in zip((0, *self.limits), self.limits, strict=False):
            piece = values[:, start:stop]
            apart = max(float(np.linalg.norm(one - piece[0])) for one in piece)
            found.append(apart / max(float(np.linalg.norm(piece, axis=1).max()), 1e-300))
        return np.array(found, dtype=np.float64)

    def equal(self, step: int) -> bool:
        """Return whether all ranks hold the same weights, up to rounding."""
        return bool(self.spread(step).max(initial=0.0) <= SAME * (step + 1))

    def moved(self, step: int) -> float:
        """Return how far the weights moved since the step before, relatively; 0 if unknown."""
        if step - 1 not in self.values:
            return 0.0
        before, after = self.values[step - 1], self.values[step]
        return float(np.linalg.norm(after - before) / max(float(np.linalg.norm(before)), 1e-300))


def read_replicas(recording: Recording) -> dict[int, Replicas]:
    """Return the weights by optimiser; without those that are sharded or differ in their shapes."""
    found = {}
    for o in chain.from_iterable(lasting_optimizers(recording)):
        rows = [parameter_rows(rank, o) for rank in recording.ranks]
        if len({tuple((r[0], r[1], tuple(r[2])) for r in one) for one in rows}) > 1:
            continue
        if all(_steps_with_others(rank, o) for rank in recording.ranks):
            continue  # it steps with gradients that no backward() gave: these are not the weights
        if any(row[6] < row[4] for one in rows for row in one):
            continue
        limits = np.cumsum([len(coordinates(row[4])) for row in rows[0]]).astype(int)
        names = tuple(str(row[1] or row[0]) for row in rows[0])
        values = _by_step(recording, o)
        width = min((one.shape[1] for one in values.values()), default=0)
        known = int(np.searchsorted(limits, width, side="right"))
        values = {step: one[:, : limits[known - 1]] for step, one in values.items() if known}
        found[o] = Replicas(o, names[:known], tuple(int(one) for one in limits[:known]), values)
    return found


def _steps_with_others(rank: RankRecords, o: int) -> bool:
    steps = [one for one in rank.by_kind["step"] if one["o"] == o]
    own, got = ([rank.numbers(one[name]) for one in steps] for name in ("own", "got"))
    return not any(np.any(one) for one in own) and any(np.any(one) for one in got)


def _by_step(recording: Recording, o: int) -> dict[int, Numbers]:
    """Return (ranks, columns) of each step that all ranks recorded with finite weights."""
    end = first_step_apart(recording)
    ranks = [
        {
            one["step"]: values
            for one in rank.by_kind["weights"]
            if one["o"] == o
            and one["step"] < end
            and (values := rank.numbers(one["values"])) is not None
        }
        for rank in recording.ranks
    ]
    found = {}
    for step in sorted(set.intersection(*(set(one) for one in ranks))):
        rows = [one[step] for one in ranks]
        if len({len(one) for one in rows}) == 1 and all(np.isfinite(one).all() for one in rows):
            found[step] = np.array(rows, dtype=np.float64)
    return found
