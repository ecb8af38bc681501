"""Findings in words, computed from the numbers alone: each a sentence, its evidence, and how far it goes.

``findings(block)`` speaks of one block of comparable cells. A sentence that the data does not carry is not written: no order
without intervals that lie apart, no equality of accuracies near chance, nothing about cells that have not ended. This module
has the list and the sentences about how far the rest carries; ``speed_findings``, ``training_findings`` and
``prediction_findings`` have the others.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lab.report import prediction_findings, speed_findings, training_findings
from lab.report.sentences import BOUND, REACH, Finding, listed, merged, timed
from lab.report.view import ComparisonGroup, percent

_NOISY = 0.5  # of the step: an interval wider than this is pointed out


def findings(block: ComparisonGroup, timelines: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return what the cells of ``block`` show, in the order in which it is to be read."""
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
        nothing = "No cell has ended yet, so there is nothing to find."
        found.insert(0, Finding(REACH, nothing, caution=True))
    return merged(found)


def unfinished(block: ComparisonGroup) -> Iterator[Finding]:
    """Cells that failed, are pending, or have fewer repeats than planned."""
    texts = {
        "failed": "failed and {} not part of any comparison here.",
        "pending": "{} not been run yet.",
        "partial": "{} only partly done: the numbers rest on fewer repeats than planned.",
    }
    verbs = {"failed": ("is", "are"), "pending": ("has", "have"), "partial": ("is", "are")}
    for status, text in texts.items():
        rows = [row for row in block.rows if row.status == status]
        if rows:
            yield Finding(
                REACH,
                f"{listed([row.id for row in rows])} {text.format(verbs[status][len(rows) > 1])}",
                f"{len(rows)} of {len(block.rows)} cells",
                caution=True,
            )


def oversubscription(block: ComparisonGroup) -> Iterator[Finding]:
    """Ranks that share cores."""
    rows = [row for row in block.measured if row.cell.get("oversubscribed")]
    if rows:
        counts = listed([str(nodes) for nodes in sorted({row.nodes for row in rows})])
        yield Finding(
            BOUND,
            f"On {counts} nodes the ranks share cores: their compute and waiting times, speed-ups and "
            "efficiencies are not those of as many machines. What the strategies send, and whether their losses "
            "agree, holds all the same.",
            f"marked so: {listed([row.id for row in rows])}",
            caution=True,
        )


def emulation(block: ComparisonGroup) -> Iterator[Finding]:
    """What emulated compute leaves out."""
    if block.emulated and block.settings.get("compute") not in (None, "real") and block.measured:
        yield Finding(
            REACH,
            "Compute is EMULATED: step times, overlap, waiting and bytes can be read, losses and accuracies do "
            "not exist, and memory holds parameters, gradients and buffers, but no activations.",
            f"times of profile {block.settings['compute']}",
            caution=True,
        )


def noisy(block: ComparisonGroup) -> Iterator[Finding]:
    """Cells whose repeats lie so far apart that little can be said."""
    rows = [
        row
        for row in block.measured
        if (ends := row.interval("step")) and ends[1] - ends[0] > _NOISY * row.measured_step
    ]
    if rows:
        yield Finding(
            REACH,
            f"The repeats of {listed([row.id for row in rows])} lie so far apart that the 95 "
            f"% interval is wider than {percent(_NOISY)} of the step: too few repeats, or a machine that had other "
            "things to do.",
            "; ".join(f"{row.id} {timed(row)}" for row in rows),
            caution=True,
        )
