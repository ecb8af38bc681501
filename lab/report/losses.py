"""Loss curves by strategy and seed, and how far they lie apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.report.view import CellRow


def losses(repeat: Mapping[str, Any]) -> dict[int, float]:
    """The finite losses of one repeat by step."""
    return {
        int(step): loss
        for step, loss in repeat.get("losses") or []
        if loss is not None and loss - loss == 0
    }


def by_seed(row: CellRow) -> dict[int, dict[int, float]]:
    """The losses of a cell's first good repeat of each seed that has some."""
    found: dict[int, dict[int, float]] = {}
    for repeat in row.repeats:
        if (curve := losses(repeat)) and repeat.get("seed", 0) not in found:
            found[repeat.get("seed", 0)] = curve
    return found


@dataclass(frozen=True)
class Difference:
    """The largest distance of two loss curves of one seed: between which strategies, at which step, beside which loss."""

    value: float
    step: int
    loss: float
    one: str
    other: str
    first: float  # the distance at the first step that both have
    strategies: int


def largest_difference(rows: list[CellRow]) -> Difference | None:
    """Compare the losses of ``rows`` step by step, seed by seed; None where no two have a step in common."""
    found = list(_differences(rows))
    if not found:
        return None
    first_step = min(step for _, step, *_ in found)
    value, step, low, one, other = max(found, key=lambda entry: entry[0])
    return Difference(
        value,
        step,
        low,
        one,
        other,
        max(entry[0] for entry in found if entry[1] == first_step),
        sum(bool(by_seed(row)) for row in rows),
    )


def _differences(rows: list[CellRow]) -> Iterator[tuple[float, int, float, str, str]]:
    curves = [(row.sync, by_seed(row)) for row in rows]
    for seed in {seed for _, seeds in curves for seed in seeds}:
        mine = [(sync, seeds[seed]) for sync, seeds in curves if seed in seeds]
        for step in {step for _, curve in mine for step in curve}:
            here = sorted((curve[step], sync) for sync, curve in mine if step in curve)
            if len(here) > 1:
                (low, one), (high, other) = here[0], here[-1]
                yield high - low, step, low, one, other
