"""Findings about what was learned: accuracies and the time to an accuracy."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from lab.report.sentences import ReportFinding, listed, on_nodes
from lab.report.view import CellRow, ComparisonGroup, percent

_NEAR_CHANCE = 1.5  # times the accuracy of guessing


def accuracies(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Compare the accuracies on the test images; near chance they show nothing."""
    for nodes in sorted({row.nodes for row in block.measured}):
        reached = [
            (row, values) for row in block.at(nodes) if (values := _recorded(row, "test_accuracy"))
        ]
        if not reached:
            continue
        evidence = "; ".join(f"{row.sync} {_spread(values)}" for row, values in reached)
        if block.classes is None:
            yield ReportFinding(
                "Accuracy",
                f"{on_nodes(nodes)} accuracies were measured, but the number of classes is "
                "unknown, so they cannot be compared with guessing.",
                evidence,
                caution=True,
            )
            continue
        limit = _NEAR_CHANCE / block.classes
        near = [row.sync for row, values in reached if fmean(values) <= limit]
        if near:
            yield ReportFinding(
                "Accuracy",
                f"{on_nodes(nodes)} the test accuracy{_of(near, nodes)} is near chance (at most "
                f"{percent(limit, 1)} with {block.classes} classes). Equal accuracies there show "
                "nothing: train longer, or with a smaller learning rate.",
                evidence,
                caution=True,
            )
        above = [(row, values) for row, values in reached if fmean(values) > limit]
        yield from _above_chance(nodes, above, evidence)


def _of(syncs: Sequence[str], nodes: int) -> str:
    return f" of {listed(syncs)}" if nodes > 1 else ""


def _recorded(row: CellRow, name: str) -> list[float]:
    """Return ``name`` of the repeats that have it."""
    return [repeat[name] for repeat in row.repeats if repeat.get(name) is not None]


def _above_chance(
    nodes: int, reached: Sequence[tuple[CellRow, list[float]]], evidence: str
) -> Iterator[ReportFinding]:
    exact = [value for row, values in reached if row.exact for value in values]
    if not exact:
        return
    of = _of([row.sync for row, _ in reached if row.exact], nodes)
    spread = (
        " Each ran once, so small differences show nothing."
        if min(len(values) for _, values in reached) < 2
        else ""
    )
    yield ReportFinding(
        "Accuracy",
        f"{on_nodes(nodes)} the test accuracy{of} is {_between(exact)}.{spread}",
        evidence,
    )
    for row, values in reached:
        if not row.exact:
            points = 100 * (fmean(values) - fmean(exact))
            side = (
                "within their range"
                if min(exact) <= fmean(values) <= max(exact)
                else f"{abs(points):.1f} points {'above' if points > 0 else 'below'} their mean"
            )
            yield ReportFinding(
                "Accuracy",
                f"{on_nodes(nodes)} {row.sync}, which does not claim to be exact, reaches "
                f"{percent(fmean(values), 1)}; the exact strategies {_between(exact)}: {side}.",
                f"{row.sync} {_spread(values)}; the exact mean {percent(fmean(exact), 1)}",
            )


def _between(values: Sequence[float]) -> str:
    low, high = percent(min(values), 1), percent(max(values), 1)
    return low if low == high else f"{low} to {high}"


def _spread(values: Sequence[float]) -> str:
    several = f" ({_between(values)}, {len(values)} repeats)" if len(values) > 1 else ""
    return percent(fmean(values), 1) + several


def time_to_accuracy(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say how many seconds of training each strategy needed to reach the required accuracy."""
    target = block.settings.get("until_accuracy")
    if not target:
        return
    for row in block.measured:
        times, tried = _recorded(row, "seconds_to_accuracy"), len(row.repeats)
        where = f"{on_nodes(row.nodes)} {row.sync if row.nodes > 1 else 'a run'}"
        if not times:
            yield ReportFinding(
                "Accuracy",
                f"{where} did not reach {percent(target)} in any of {tried} runs.",
                caution=True,
            )
            continue
        reached = len(times)
        spread = f"{min(times):.1f} to {max(times):.1f} s over {reached} runs"
        missed = f"; {tried - reached} of {tried} runs did not reach it" if tried > reached else ""
        steps = ", ".join(map(str, _recorded(row, "steps_to_accuracy"))) or "not recorded"
        yield ReportFinding(
            "Accuracy",
            f"{where} reached {percent(target)} after {median(times):.1f} s of training "
            f"({spread if reached > 1 else 'one run'}){missed}.",
            f"seconds {', '.join(f'{time:.1f}' for time in times)}; steps {steps}",
        )
