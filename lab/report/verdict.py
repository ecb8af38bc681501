"""The answer that a report opens with: one sentence and three numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.report.sentences import SPEED, Finding
from lab.report.view import ComparisonGroup, percent, seconds_text


@dataclass(frozen=True)
class KeyNumber:
    """A number of the answer: ``label`` names it, ``value`` has its unit, ``note`` says of what."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Verdict:
    """The answer to "which is fastest, and are all of them right?"; ``wrong`` is shown in red."""

    text: str
    numbers: tuple[KeyNumber, ...]
    wrong: bool


def verdict(block: ComparisonGroup, found: Sequence[Finding]) -> Verdict:
    """Return the answer of ``block``, whose findings are ``found``."""
    wrong = [finding for finding in found if finding.wrong]
    speed = [finding for finding in found if finding.topic == SPEED]
    text = " ".join(finding.text for finding in (wrong or speed)[:1]) or "Nothing is measured yet."
    rows = sorted(
        (row for row in block.measured if row.nodes == block.nodes[-1]),
        key=lambda row: row.measured_step,
    )
    if not rows:
        return Verdict(text, (), bool(wrong))
    best, last = rows[0], rows[-1]
    sync = best.median("sync") or 0.0
    numbers = (
        KeyNumber("shortest step", f"{seconds_text(best.step, best.step)} s", best.name),
        KeyNumber(
            "exposed communication", percent(sync / best.measured_step), f"of a step of {best.name}"
        ),
        KeyNumber(
            "slowest over fastest",
            f"{last.measured_step / best.measured_step:.2f} times",
            f"{last.name} over {best.name}",
        ),
    )
    return Verdict(text, numbers, bool(wrong))
