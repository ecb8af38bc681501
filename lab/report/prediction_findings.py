"""Findings about predictions: step times against measured ones, bytes against counted ones."""

from collections.abc import Iterator

from lab.report.sentences import Finding, listed
from lab.report.view import ComparisonGroup, percent

_WITHIN = 0.20


def predictions(block: ComparisonGroup) -> Iterator[Finding]:
    """Say how many predicted step times lie within 20 % of the measured ones."""
    errors = {row.id: row.error for row in block.measured if row.error is not None}
    texts = {name: percent(error, 1, signed=True) for name, error in errors.items()}
    inside = [row.id for row in block.measured if row.id in errors and row.in_scope]
    if inside:
        far = [name for name in inside if abs(errors[name]) > _WITHIN]
        worst = max(inside, key=lambda name: abs(errors[name]))
        beyond = f" Outside: {listed([f'{name} ({texts[name]})' for name in far])}." if far else ""
        yield Finding(
            "Prediction",
            f"{len(inside) - len(far)} of {len(inside)} predictions in scope lie within "
            f"{percent(_WITHIN)} of the measured step time; the farthest off is {worst} with "
            f"{texts[worst]}.{beyond}",
            "; ".join(f"{name} {texts[name]}" for name in inside),
            caution=bool(far),
        )
    outside = {row.id: row for row in block.measured if row.id in errors and not row.in_scope}
    if outside:
        reasons = {str(row.prediction.get("why") or "no reason given") for row in outside.values()}
        low, high = (texts[pick(outside, key=errors.__getitem__)] for pick in (min, max))
        lie, shown = (
            ("cell lies", f"its error, {low}, is")
            if len(outside) == 1
            else ("cells lie", f"their errors, {low} to {high}, are")
        )
        yield Finding(
            "Prediction",
            f"{len(outside)} {lie} out of the model's scope ({listed(sorted(reasons))}); {shown} "
            "shown, not counted.",
            "; ".join(f"{name} {texts[name]}" for name in outside),
            caution=True,
        )


def bytes_as_predicted(block: ComparisonGroup) -> Iterator[Finding]:
    """Say whether the bytes that each rank counted equal the formulas."""
    both = {
        row.id: (row.prediction["bytes_sent"], counted)
        for row in block.measured
        if row.nodes > 1
        and row.prediction.get("bytes_sent")
        and (counted := row.per_rank("bytes_sent"))
    }
    wrong = [
        name
        for name, (formula, counted) in both.items()
        if len(formula) != len(counted)
        or any(abs(one - other) > 0.5 for one, other in zip(formula, counted, strict=True))
    ]
    if wrong:
        formula, counted = ([round(value) for value in values] for values in both[wrong[0]])
        yield Finding(
            "Prediction",
            f"The bytes counted differ from the formulas in {listed(wrong)}.",
            f"{wrong[0]}: formula {formula}, counted {counted}",
            caution=True,
        )
    elif both:
        yield Finding(
            "Prediction",
            f"The bytes that every rank sent equal the formulas in all {len(both)} cells that have "
            "both.",
            "compared rank by rank, to half a byte a step",
        )
