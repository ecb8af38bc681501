"""The findings of a report: sentences with evidence and limits, computed from the numbers alone.

``findings(block)`` lists them. They claim only what the data supports: no order if the intervals
overlap, no equal accuracies near chance, nothing about unfinished cells. Each module of this
package writes the sentences of one topic.
"""

from collections.abc import Mapping
from typing import Any

from lab.report.findings import equal_results, limits, prediction, speed, training
from lab.report.sentences import REACH, ReportFinding, merged
from lab.report.view import ComparisonGroup


def findings(
    block: ComparisonGroup, timelines: Mapping[str, Any] | None = None
) -> list[ReportFinding]:
    """Return what the cells of ``block`` show, in reading order."""
    found = [
        *equal_results.equal_results(block),
        *limits.unfinished(block),
        *limits.emulation(block),
        *limits.noisy(block),
        *speed.fastest(block),
        *speed.slower_than_one(block),
        *speed.above_ideal(block),
        *speed.bounds(block),
        *speed.stragglers(block),
        *speed.overlaps(block, timelines or {}),
        *limits.oversubscription(block),
        *speed.root_share(block),
        *training.accuracies(block),
        *training.time_to_accuracy(block),
        *prediction.predictions(block),
        *prediction.made_in_time(block),
        *prediction.bytes_as_predicted(block),
    ]
    if not block.measured:
        found.insert(
            0,
            ReportFinding(
                REACH, "No run has ended yet, so there is nothing to report.", caution=True
            ),
        )
    return merged(found)
