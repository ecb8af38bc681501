"""Findings about predictions: step times against measured ones, bytes against counted ones."""

from collections.abc import Iterator

from lab.report.sentences import ReportFinding, listed
from lab.report.view import ComparisonGroup, percent

_WITHIN = 0.20


def predictions(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say how many predicted step times lie within 20 % of the measured ones."""
    errors = {row.name: row.error for row in block.measured if row.error is not None}
    texts = {name: percent(error, 1, signed=True) for name, error in errors.items()}
    inside = [row.name for row in block.measured if row.name in errors and row.in_scope]
    if inside:
        far = [name for name in inside if abs(errors[name]) > _WITHIN]
        worst = max(inside, key=lambda name: abs(errors[name]))
        beyond = f" Outside: {'; '.join(f'{name} ({texts[name]})' for name in far)}." if far else ""
        yield ReportFinding(
            "Prediction",
            f"{len(inside) - len(far)} of {len(inside)} predictions in scope lie within "
            f"{percent(_WITHIN)} of the measured step time; the largest error is {texts[worst]} "
            f"({worst}).{beyond}",
            "; ".join(f"{name}: {texts[name]}" for name in inside),
            caution=bool(far),
        )
    outside = {row.name: row for row in block.measured if row.name in errors and not row.in_scope}
    if outside:
        reasons = {str(row.prediction.get("why") or "no reason given") for row in outside.values()}
        low, high = (texts[pick(outside, key=errors.__getitem__)] for pick in (min, max))
        are, errors_are = (
            ("prediction is", f"its error, {low}, is")
            if len(outside) == 1
            else ("predictions are", f"their errors, {low} to {high}, are")
        )
        yield ReportFinding(
            "Prediction",
            f"{len(outside)} {are} outside the model's scope ({listed(sorted(reasons))}); "
            f"{errors_are} shown but not counted.",
            "; ".join(f"{name}: {texts[name]}" for name in outside),
            caution=True,
        )


def made_in_time(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say whether the prediction was made before the first run started."""
    made, first = block.predicted_at, block.first_start
    if not made or not first or not any(row.prediction for row in block.measured):
        return
    if made <= first:
        yield ReportFinding(
            "Prediction",
            f"The prediction was made before the first run started, at {_clock(first)}.",
        )
    else:
        yield ReportFinding(
            "Prediction",
            f"The prediction was made after the first run had started ({_clock(first)}, then "
            f"{_clock(made)}), so it is no forecast of that run.",
            caution=True,
        )


def _clock(moment: str) -> str:
    """Return an ISO time without its fraction, for a person."""
    return moment.replace("T", " ").split(".")[0]


def bytes_as_predicted(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say whether the bytes that each rank counted equal the formulas."""
    both = {
        row.name: (row.prediction["bytes_sent"], counted)
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
        yield ReportFinding(
            "Prediction",
            f"The counted bytes differ from the formulas with {'; '.join(wrong)}.",
            f"{wrong[0]}: formula {formula}, counted {counted}",
            caution=True,
        )
    elif both:
        cells = "the one cell that has both" if len(both) == 1 else f"all {len(both)} cells"
        yield ReportFinding(
            "Prediction",
            f"Every rank sent as many bytes as the formulas say, in {cells}.",
            "compared for each rank and step, to half a byte",
        )
