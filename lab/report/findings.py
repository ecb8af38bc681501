"""The findings of a report: sentences with evidence and limits, computed from the numbers alone.

``findings(block)`` lists them. They claim only what the data supports: no order if the intervals
overlap, no equal accuracies near chance, nothing about unfinished cells. This module writes the
sentences about such limits. The other ``*_findings`` modules write the rest.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lab.report import prediction_findings, speed_findings, training_findings
from lab.report.sentences import BOUND, REACH, Finding, listed, merged, timed
from lab.report.view import ComparisonGroup, percent

_NOISY = 0.5  # of the step: a wider interval gets a warning


def findings(block: ComparisonGroup, timelines: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return what the cells of ``block`` show, in reading order."""
    found = [
        *unfinished(block),
        *emulation(block),
        *noisy(block),
        *speed_findings.fastest(block),
        *speed_findings.slower_than_one(block),
        *speed_findings.bounds(block),
        *speed_findings.stragglers(block),
        *speed_findings.overlaps(block, timelines or {}),
        *oversubscription(block),
        *speed_findings.root_share(block),
        *training_findings.exact_losses(block),
        *training_findings.accuracies(block),
        *training_findings.time_to_accuracy(block),
        *prediction_findings.predictions(block),
        *prediction_findings.bytes_as_predicted(block),
    ]
    if not block.measured:
        found.insert(
            0,
            Finding(REACH, "No cell has ended yet, so there is nothing to find.", caution=True),
        )
    return merged(found)


def unfinished(block: ComparisonGroup) -> Iterator[Finding]:
    """Name the cells that failed, are pending, or have fewer repeats than planned."""
    texts = (
        ("failed", "is", "are", "failed and {} not part of any comparison here."),
        ("pending", "has", "have", "{} not been run yet."),
        (
            "partial",
            "is",
            "are",
            "{} only partly done: the numbers rest on fewer repeats than planned.",
        ),
    )
    for status, singular, plural, text in texts:
        names = [row.id for row in block.rows if row.status == status]
        if names:
            yield Finding(
                REACH,
                f"{listed(names)} {text.format(plural if len(names) > 1 else singular)}",
                f"{len(names)} of {len(block.rows)} cells",
                caution=True,
            )


def oversubscription(block: ComparisonGroup) -> Iterator[Finding]:
    """Name the numbers of nodes on which ranks shared cores."""
    rows = [row for row in block.measured if row.cell.get("oversubscribed")]
    if rows:
        counts = sorted({row.nodes for row in rows})
        yield Finding(
            BOUND,
            f"On {listed(list(map(str, counts)))} nodes the ranks share cores: their compute and "
            "waiting times, speed-ups and efficiencies are not those of as many machines. What the "
            "strategies send, and whether their losses agree, holds all the same.",
            f"marked so: {listed([row.id for row in rows])}",
            caution=True,
        )


def emulation(block: ComparisonGroup) -> Iterator[Finding]:
    """Say what emulated compute leaves out."""
    if block.emulated and block.settings.get("compute") not in (None, "real") and block.measured:
        yield Finding(
            REACH,
            "Compute is EMULATED: step times, overlap, waiting and bytes can be read, losses and "
            "accuracies do not exist, and memory holds parameters, gradients and buffers, but no "
            "activations.",
            f"times of profile {block.settings['compute']}",
            caution=True,
        )


def noisy(block: ComparisonGroup) -> Iterator[Finding]:
    """Name the cells whose repeats lie too far apart for a conclusion."""
    rows = [
        row
        for row in block.measured
        if (ends := row.interval("step")) and ends[1] - ends[0] > _NOISY * row.measured_step
    ]
    if rows:
        yield Finding(
            REACH,
            f"The repeats of {listed([row.id for row in rows])} lie so far apart that the 95 "
            f"% interval is wider than {percent(_NOISY)} of the step: too few repeats, or a "
            "machine that had other things to do.",
            "; ".join(f"{row.id} {timed(row)}" for row in rows),
            caution=True,
        )
