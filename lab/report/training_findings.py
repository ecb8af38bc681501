"""Findings about what was learned: losses, accuracies and the time to an accuracy."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from lab.report.losses import largest_difference
from lab.report.sentences import Finding, listed, on_nodes
from lab.report.view import CellRow, ComparisonGroup, percent

AGREE = 1e-3  # of the loss: what sums in another order leave after some steps; a wrong mean is far beyond it
NEAR_CHANCE = 1.5  # times the share that guessing reaches


def exact_losses(block: ComparisonGroup) -> Iterator[Finding]:
    """Whether the exact strategies' losses lie on one another, at each number of nodes."""
    for nodes in block.nodes_beyond_one:
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
            if (values := _recorded(row, "test_accuracy"))
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
        above = {sync: entry for sync, entry in reached.items() if sync not in near}
        yield from _above_chance(nodes, above, evidence)


def _recorded(row: CellRow, name: str) -> list[float]:
    """``name`` of the repeats that have it."""
    return [repeat[name] for repeat in row.repeats if repeat.get(name) is not None]


def _above_chance(
    nodes: int, reached: dict[str, tuple[CellRow, list[float]]], evidence: str
) -> Iterator[Finding]:
    exact_ones = [sync for sync, (row, _) in reached.items() if row.exact]
    exact = [value for sync in exact_ones for value in reached[sync][1]]
    if not exact:
        return
    few = min(len(values) for _, values in reached.values()) < 2
    spread = " One repeat each, so no spread: small differences show nothing." if few else ""
    of = f" of {listed(exact_ones)}" if nodes > 1 else ""
    text = f"{on_nodes(nodes)} the test accuracy{of} is {_between(exact)}.{spread}"
    yield Finding("Accuracy", text, evidence)
    for sync, (row, values) in reached.items():
        if not row.exact:
            points = 100 * (fmean(values) - fmean(exact))
            side = f"{abs(points):.1f} points {'above' if points > 0 else 'below'} their mean"
            if min(exact) <= fmean(values) <= max(exact):
                side = "within their range"
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
    several = f" ({_between(values)}, {len(values)} repeats)" if len(values) > 1 else ""
    return percent(fmean(values), 1) + several


def time_to_accuracy(block: ComparisonGroup) -> Iterator[Finding]:
    """Seconds until the accuracy asked for, with the spread over the seeds."""
    target = block.settings.get("until_accuracy")
    if not target:
        return
    for row in block.measured:
        times = _recorded(row, "seconds_to_accuracy")
        steps = ", ".join(map(str, _recorded(row, "steps_to_accuracy"))) or "not recorded"
        tried, reached = len(row.repeats), len(times)
        where = f"{on_nodes(row.nodes)} {row.sync if row.nodes > 1 else 'a run'}"
        if not times:
            text = f"{where} did not reach {percent(target)} in any of {tried} runs."
            yield Finding("Accuracy", text, caution=True)
            continue
        spread = f" ({min(times):.1f} to {max(times):.1f} s over {reached} runs)"
        if reached == 1:
            spread = " (one run)"
        missed = f"; {tried - reached} of {tried} runs did not reach it" if tried > reached else ""
        evidence = f"seconds {', '.join(f'{time:.1f}' for time in times)}; steps {steps}"
        yield Finding(
            "Accuracy",
            f"{where} reached {percent(target)} after {median(times):.1f} s of training{spread}{missed}.",
            evidence,
        )
