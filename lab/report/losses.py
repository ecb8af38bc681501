"""Loss curves by strategy, and the greatest difference between them."""

import math
from collections.abc import Mapping
from statistics import mode
from typing import NamedTuple

from common.utils.grouping import grouped
from lab.comparison.record import Repeat
from lab.report.view import Rows

Curves = Mapping[str, Mapping[int, float]]


class Difference(NamedTuple):
    """The distance from the lowest loss of a step to the highest, and whose they are."""

    value: float
    step: int
    loss: float  # the lowest
    lowest: str
    highest: str


def curves(rows: Rows) -> Curves:
    """Return the finite losses by strategy and step, from the first run of each that has any.

    The runs have the same seed: the one that most have, of several the smallest.
    """
    found = []
    for row in rows:
        for run in row.runs:
            losses = _finite(run)
            if losses:
                found.append((run.seed, row.sync, losses))
    if not found:
        return {}
    commonest = mode(sorted(seed for seed, _, _ in found))
    # Reversed: of several runs of a strategy the first stays.
    return {sync: losses for seed, sync, losses in reversed(found) if seed == commonest}


def _finite(run: Repeat) -> dict[int, float]:
    return {step: loss for step, loss in run.losses if loss is not None and math.isfinite(loss)}


def differences(by_sync: Curves) -> list[Difference]:
    """Compare the losses at each step that at least two curves have."""
    points = grouped(
        (step, (loss, sync)) for sync, curve in by_sync.items() for step, loss in curve.items()
    )
    found = []
    for step, losses in points.items():
        if len(losses) > 1:
            low, lowest = min(losses)
            high, highest = max(losses)
            found.append(Difference(high - low, step, low, lowest, highest))
    return found
