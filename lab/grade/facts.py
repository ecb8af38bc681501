"""What was seen of a part: ``Facts``, which part.py writes and marks.py reads.

``AuditFacts`` has what a mark follows from; the file keeps all that ``lab audit --json`` writes.
"""

import msgspec

from lab.audit.findings.finding import FAULT


class CodePlace(msgspec.Struct):
    """A line of the script."""

    file: str
    line: int


class AuditFinding(msgspec.Struct):
    """A finding of the audit; its texts are shown to students."""

    name: str
    severity: str
    title: str
    cure: str
    sure: str
    at: CodePlace | None

    @property
    def is_certain(self) -> bool:
        """Whether the audit is sure of it."""
        return self.sure == "certain"


class AuditedRun(msgspec.Struct):
    """A run on a number of ranks."""

    ranks: int


class AuditFacts(msgspec.Struct):
    """The entries of ``lab audit --json`` that a mark follows from.

    status : 0 right, 1 faults, 2 could not be audited or cannot tell.
    """

    status: int
    headline: str
    failure: str | None
    unknown: list[str]
    findings: list[AuditFinding]
    runs: list[AuditedRun]

    @property
    def faults(self) -> list[AuditFinding]:
        """The findings that may cost points."""
        return [finding for finding in self.findings if finding.severity == FAULT]

    @property
    def found_faults(self) -> bool:
        """Whether it says that the script is wrong."""
        return self.status == 1

    @property
    def cannot_tell(self) -> bool:
        """Whether it could not judge the script at all."""
        return self.status == 2


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a part, without any judgement.

    Parameters
    ----------
    key : of all that they follow from.
    used : the collectives that its ranks called, and "ddp".
    whole : whether all ranks that trained came to the audit's end.
    doubts : why the records may not be what the probe wrote, or are not all.
    """

    key: str
    audit: AuditFacts
    used: list[str]
    whole: bool
    doubts: list[str]
    seconds: float
