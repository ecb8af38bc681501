"""Loss curves by strategy, the greatest difference between them, and the table of losses."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from statistics import mode

from common.utils.grouping import grouped
from lab.comparison.record import Repeat
from lab.report.view import NOTHING, CellRow, ComparisonGroup, Rows

_EVERY = 20  # iterations, at which the assignment asks for the loss
_MOST_ROWS = 40

Curves = Mapping[str, Mapping[int, float]]


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
    chosen: dict[str, Mapping[int, float]] = {}
    for seed, sync, losses in found:
        if seed == commonest:
            chosen.setdefault(sync, losses)
    return chosen


def _finite(run: Repeat) -> dict[int, float]:
    return {step: loss for step, loss in run.losses if loss is not None and math.isfinite(loss)}


def differences(by_sync: Curves) -> list[float]:
    """Return the range of the losses at each step that at least two curves have."""
    points = grouped((step, loss) for curve in by_sync.values() for step, loss in curve.items())
    return [max(losses) - min(losses) for losses in points.values() if len(losses) > 1]


@dataclass
class LossTable:
    """The losses at some steps, a row a step and a column a cell, as text."""

    headings: list[str]
    rows: list[list[str]]


def loss_table(block: ComparisonGroup) -> LossTable | None:
    """Return the recorded losses at steps 20, 40, ... and at the last step; None without losses.

    Of each cell the run that ``curves`` chooses. A run of fewer steps has a row for the first and
    the last; a long one has fewer rows.
    """
    columns: dict[CellRow, Mapping[int, float]] = {}
    for nodes in sorted({row.nodes for row in block.measured}):
        rows = block.at(nodes)
        found = curves(rows)
        columns |= {row: found[row.sync] for row in rows if row.sync in found}
    if not columns:
        return None
    return LossTable(
        ["step", *(row.name for row in columns)],
        [
            [str(step), *(_loss_text(losses.get(step)) for losses in columns.values())]
            for step in _steps({step for losses in columns.values() for step in losses})
        ],
    )


def _steps(recorded: Set[int]) -> list[int]:
    """Return which of the recorded steps the table shows."""
    first = min(recorded)
    last = max(recorded)
    every = _EVERY
    while last // every > _MOST_ROWS:
        every *= 5
    chosen = set(range(every, last + 1, every)) or {first}
    return sorted(chosen & recorded | {last})


def _loss_text(loss: float | None) -> str:
    return NOTHING if loss is None else f"{loss:.4f}"
