"""Loss curves by strategy, and the greatest difference between them."""

import math
from collections.abc import Mapping
from statistics import mode
from typing import NamedTuple

from common.utils.grouping import grouped
from lab.report.view import Rows

Curves = Mapping[str, Mapping[int, float]]


class Difference(NamedTuple):
    """The distance from the lowest loss (of strategy ``one``) to the highest (of ``other``)."""

    value: float
    step: int
    loss: float  # the lowest
    one: str
    other: str


def curves(rows: Rows) -> Curves:
    """Return the finite losses by strategy and step, from the first run of each that has any.

    The runs have the same seed: the one that most have, of several the smallest.
    """
    found = [
        (run["seed"], row.sync, losses)
        for row in rows
        for run in row.runs
        if (
            losses := {
                step: loss
                for step, loss in run.get("losses", [])
                if loss is not None and math.isfinite(loss)
            }
        )
    ]
    seed = mode(sorted(own for own, _, _ in found)) if found else None
    return {sync: losses for own, sync, losses in reversed(found) if own == seed}


def differences(found: Curves) -> list[Difference]:
    """Compare the losses at each step that at least two curves have."""
    points = grouped(
        (step, (loss, sync)) for sync, curve in found.items() for step, loss in curve.items()
    )
    return [
        Difference(max(some)[0] - min(some)[0], step, *min(some), max(some)[1])
        for step, some in points.items()
        if len(some) > 1
    ]
