"""Loss curves by strategy and seed, and how far they lie apart."""

import math
from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from lab.report.view import CellRow


class Difference(NamedTuple):
    """The distance from the lowest loss (of strategy ``one``) to the highest (of ``other``)."""

    value: float
    step: int
    loss: float  # the lowest
    one: str
    other: str


def by_seed(row: CellRow) -> dict[int, dict[int, float]]:
    """Return losses by seed and step, from the first repeat of each seed that recorded any."""
    curves = [(repeat.get("seed", 0), _losses(repeat)) for repeat in row.repeats]
    return {seed: curve for seed, curve in reversed(curves) if curve}


def _losses(repeat: Mapping[str, Any]) -> dict[int, float]:
    """Return the finite losses of one repeat by step."""
    return {
        int(step): loss
        for step, loss in repeat.get("losses") or []
        if loss is not None and math.isfinite(loss)
    }


def differences(rows: list[CellRow]) -> list[Difference]:
    """Compare the losses of ``rows`` at each step and seed that at least two of them have."""
    points = sorted(
        (seed, step, loss, row.sync)
        for row in rows
        for seed, curve in by_seed(row).items()
        for step, loss in curve.items()
    )
    several = [list(points) for _, points in groupby(points, itemgetter(0, 1))]
    return [
        Difference(high - low, step, low, one, other)
        for (_, step, low, one), *_, (_, _, high, other) in (
            points for points in several if len(points) > 1
        )
    ]


def largest_difference(rows: list[CellRow]) -> Difference | None:
    """Return the largest of ``differences``, or None if no two rows have a step in common."""
    return max(differences(rows), key=attrgetter("value"), default=None)
