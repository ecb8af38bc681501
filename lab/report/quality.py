"""Findings about what was learned and what was foretold: losses, accuracy, time to accuracy, predictions, bytes."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from lab.report.findings import Finding, listed, on_nodes
from lab.report.losses import largest_difference
from lab.report.view import CellRow, ComparisonGroup, percent

AGREE = 1e-3  # of the loss: what sums in another order leave after some steps; a wrong mean is far beyond it
NEAR_CHANCE = 1.5
WITHIN = 0.20


def exact_losses(block: ComparisonGroup) -> Iterator[Finding]:
    """Whether the exact strategies' losses lie on one another, at each number of nodes."""
    for nodes in [nodes for nodes in block.nodes if nodes > 1]:
        rows = [row for row in block.at(nodes) if row.exact]
        found = largest_difference(rows)
        if found is None:
            continue
        where, limit = on_nodes(nodes), AGREE * abs(found.loss)
        evidence = (
            f"{found.value:.2g} at step {found.step}, {found.one} against {found.other}, loss {found.loss:.3f}; "
            f"{found.first:.2g} at the first step; {listed([row.sync for row in rows])}"
        )
        if found.first > limit:
            yield Finding(
                "Losses",
                f"{where} the exact strategies differ from the first step on, by {found.first:.2g}, before "
                "any gradient was exchanged: they did not start alike, and their losses cannot be compared.",
                evidence,
                caution=True,
            )
        elif found.value == 0:
            yield Finding(
                "Losses",
                f"{where} the losses of the {found.strategies} exact strategies are equal at every step, to "
                "the last digit.",
                evidence,
            )
        elif found.value <= limit:
            yield Finding(
                "Losses",
                f"{where} the losses of the {found.strategies} exact strategies agree: they differ by "
                f"{found.value:.2g} at most, at step {found.step}.",
                evidence,
            )
        else:
            yield Finding(
                "Losses",
                f"{where} the losses of the {found.strategies} exact strategies start alike and drift "
                f"apart, by {found.value:.2g} at most, at step {found.step}. Sums in another order can grow to that "
                "over many steps, and so can an error in a strategy; this report cannot tell which it is.",
                evidence,
                caution=True,
            )


def accuracies(block: ComparisonGroup) -> Iterator[Finding]:
    """Accuracies on the test images where they were evaluated; near chance they show nothing."""
    for nodes in sorted({row.nodes for row in block.measured}):
        reached = {
            row.sync: (row, values)
            for row in block.at(nodes)
            if (
                values := [
                    repeat["test_accuracy"]
                    for repeat in row.repeats
                    if repeat.get("test_accuracy") is not None
                ]
            )
        }
        if not reached:
            continue
        evidence = "; ".join(f"{sync} {_spread(values)}" for sync, (_, values) in reached.items())
        if block.classes is None:
            yield Finding(
                "Accuracy",
                f"{on_nodes(nodes)} accuracies were evaluated, but the number of classes is not known, so "
                "that chance is not, either: no statement.",
                evidence,
                caution=True,
            )
            continue
        limit = NEAR_CHANCE / block.classes
        near = [sync for sync, (_, values) in reached.items() if fmean(values) <= limit]
        if near:
            of = f" of {listed(near)}" if nodes > 1 else ""
            yield Finding(
                "Accuracy",
                f"{on_nodes(nodes)} the test accuracy{of} is near chance (at most {percent(limit, 1)} with "
                f"{block.classes} classes): equal accuracies there show nothing.",
                evidence,
                caution=True,
            )
        yield from _above_chance(
            nodes, {sync: entry for sync, entry in reached.items() if sync not in near}, evidence
        )


def _above_chance(
    nodes: int, reached: dict[str, tuple[CellRow, list[float]]], evidence: str
) -> Iterator[Finding]:
    exact = [value for row, values in reached.values() if row.exact for value in values]
    if not exact:
        return
    few = min(len(values) for _, values in reached.values()) < 2
    spread = " One repeat each, so no spread: small differences show nothing." if few else ""
    of = (
        f" of {listed([sync for sync, (row, _) in reached.items() if row.exact])}"
        if nodes > 1
        else ""
    )
    yield Finding(
        "Accuracy",
        f"{on_nodes(nodes)} the test accuracy{of} is {_between(exact)}.{spread}",
        evidence,
    )
    for sync, (row, values) in reached.items():
        if not row.exact:
            points = 100 * (fmean(values) - fmean(exact))
            inside = min(exact) <= fmean(values) <= max(exact)
            side = (
                "within their range"
                if inside
                else f"{abs(points):.1f} points {'above' if points > 0 else 'below'} their mean"
            )
            yield Finding(
                "Accuracy",
                f"{on_nodes(nodes)} {sync}, which is not exact, reaches {percent(fmean(values), 1)}; the "
                f"exact ones {_between(exact)}: {side}.",
                f"{sync} {_spread(values)}; exact ones' mean {percent(fmean(exact), 1)}",
            )


def _between(values: Sequence[float]) -> str:
    low, high = percent(min(values), 1), percent(max(values), 1)
    return low if low == high else f"{low} to {high}"


def _spread(values: Sequence[float]) -> str:
    return percent(fmean(values), 1) + (
        f" ({_between(values)}, {len(values)} repeats)" if len(values) > 1 else ""
    )


def time_to_accuracy(block: ComparisonGroup) -> Iterator[Finding]:
    """Seconds until the accuracy asked for, with the spread over the seeds."""
    target = block.settings.get("until_accuracy")
    for row in block.measured if target else []:
        times = [
            repeat["seconds_to_accuracy"]
            for repeat in row.repeats
            if repeat.get("seconds_to_accuracy") is not None
        ]
        steps = [
            repeat["steps_to_accuracy"]
            for repeat in row.repeats
            if repeat.get("steps_to_accuracy") is not None
        ]
        tried, where = (
            len(row.repeats),
            f"{on_nodes(row.nodes)} {row.sync if row.nodes > 1 else 'a run'}",
        )
        if not times:
            yield Finding(
                "Accuracy",
                f"{where} did not reach {percent(target)} in any of {tried} runs.",
                caution=True,
            )
            continue
        spread = (
            f" ({min(times):.1f} to {max(times):.1f} s over {len(times)} runs)"
            if len(times) > 1
            else " (one run)"
        )
        missed = (
            f"; {tried - len(times)} of {tried} runs did not reach it" if tried > len(times) else ""
        )
        evidence = f"seconds {', '.join(f'{time:.1f}' for time in times)}; steps {', '.join(map(str, steps)) or 'not recorded'}"
        yield Finding(
            "Accuracy",
            f"{where} reached {percent(target)} after {median(times):.1f} s of training{spread}{missed}.",
            evidence,
        )


def predictions(block: ComparisonGroup) -> Iterator[Finding]:
    """Predicted step times within and outside 20 % of the measured, in scope and out of it."""
    rows = [row for row in block.measured if row.error is not None]
    errors = {row.id: percent(row.error, 1, signed=True) for row in rows}
    inside, outside = (
        [row for row in rows if row.in_scope],
        [row for row in rows if not row.in_scope],
    )
    if inside:
        far = [row for row in inside if abs(row.error) > WITHIN]
        worst = max(inside, key=lambda row: abs(row.error)).id
        beyond = (
            f" Outside: {listed([f'{row.id} ({errors[row.id]})' for row in far])}." if far else ""
        )
        yield Finding(
            "Prediction",
            f"{len(inside) - len(far)} of {len(inside)} predictions in scope lie within "
            f"{percent(WITHIN)} of the measured step time; the farthest off is {worst} with {errors[worst]}.{beyond}",
            "; ".join(f"{row.id} {errors[row.id]}" for row in inside),
            caution=bool(far),
        )
    if outside:
        why = listed(
            sorted({str(row.prediction.get("why") or "no reason given") for row in outside})
        )
        low, high = (pick(outside, key=lambda row: row.error).id for pick in (min, max))
        told = (
            f"their errors, {errors[low]} to {errors[high]}, are"
            if len(outside) > 1
            else f"its error, {errors[low]}, is"
        )
        yield Finding(
            "Prediction",
            f"{len(outside)} {'cells lie' if len(outside) > 1 else 'cell lies'} out of the model's "
            f"scope ({why}); {told} shown, not counted.",
            "; ".join(f"{row.id} {errors[row.id]}" for row in outside),
            caution=True,
        )


def bytes_as_predicted(block: ComparisonGroup) -> Iterator[Finding]:
    """Whether the bytes counted where they were sent equal the formulas, rank by rank."""
    told = {
        row.id: (row.prediction["bytes_sent"], row.per_rank("bytes_sent"))
        for row in block.measured
        if row.nodes > 1 and (row.prediction or {}).get("bytes_sent") and row.per_rank("bytes_sent")
    }
    wrong = [
        name
        for name, (formula, counted) in told.items()
        if len(formula) != len(counted)
        or any(abs(one - other) > 0.5 for one, other in zip(formula, counted, strict=True))
    ]
    if wrong:
        formula, counted = ([round(value) for value in values] for values in told[wrong[0]])
        yield Finding(
            "Prediction",
            f"The bytes counted differ from the formulas in {listed(wrong)}.",
            f"{wrong[0]}: formula {formula}, counted {counted}",
            caution=True,
        )
    elif told:
        yield Finding(
            "Prediction",
            f"The bytes that every rank sent equal the formulas in all {len(told)} cells that have both.",
            "compared rank by rank, to half a byte a step",
        )
