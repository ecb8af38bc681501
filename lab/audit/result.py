"""``AuditResult``: all that an audit has to say, for the terminal, JSON and the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lab.audit.findings.finding import Finding
from lab.audit.recording import Recording


@dataclass(frozen=True)
class EqualityVerdict:
    """Whether the script equals one process that computes each rank's share and averages.

    why : one sentence.
    """

    answer: Literal["yes", "no", "cannot tell"]
    why: str


@dataclass(frozen=True)
class AuditResult:
    """What was found in all runs of a script.

    Parameters
    ----------
    command : as typed, with its placeholders.
    recordings : one a number of ranks.
    findings : one a name, faults first.
    right, unknown : sentences on what was checked and is right, and on what could not be judged.
    remarks : on the runs themselves, e.g. that the script fixes its number of ranks.
    performance : of the largest run, see performance.py; empty if nothing was measured.
    replay : see replay.py; None if it was not asked for.
    failure : why a run could not be audited, or not to its end, and what to try; None if all could.
    """

    command: str
    recordings: tuple[Recording, ...]
    findings: tuple[Finding, ...]
    verdict: EqualityVerdict
    right: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    performance: Mapping[str, Any] | None = None
    replay: Any = None
    failure: str | None = None

    @property
    def status(self) -> int:
        """The exit status: 0 right, 1 faults, 2 could not be audited or cannot tell."""
        if self.faults:
            return 1
        return 0 if self.failure is None and self.verdict.answer == "yes" else 2

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that make the exit status 1."""
        return tuple(one for one in self.findings if one.entry.severity == "fault")

    @property
    def notices(self) -> tuple[Finding, ...]:
        """The other findings."""
        return tuple(one for one in self.findings if one.entry.severity != "fault")
