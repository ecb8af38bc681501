"""What was seen of a part: ``Facts``, which part.py writes and marks.py reads.

``AuditFacts`` has what a mark follows from; the file keeps all that ``lab audit --json`` writes.
"""

import msgspec

from lab.audit.findings.finding import FAULT


class Look(msgspec.Struct):
    """Why a person has to look at a part.

    what : what was seen, for both readers.
    student, grader : what each of them can do; "" if nothing. Neither reads the other's sentence.
    """

    what: str
    student: str = ""
    grader: str = ""

    @property
    def for_student(self) -> str:
        """What the student's page says."""
        return f"{self.what} {self.student}".strip()

    @property
    def for_grader(self) -> str:
        """What the class's page says."""
        return f"{self.what} {self.grader}".strip()


class CodePlace(msgspec.Struct):
    """A line of the script."""

    file: str
    line: int


class AuditFinding(msgspec.Struct):
    """A finding of the audit; its texts are shown to students.

    condition : what it supposes and the audit cannot tell; None for one that holds.
    """

    name: str
    severity: str
    title: str
    cure: str
    sure: str
    at: CodePlace | None
    condition: str | None = None

    @property
    def place(self) -> str:
        """Its name, with the line of the script if it has one."""
        return f"{self.name}, {self.at.file}:{self.at.line}" if self.at else self.name

    @property
    def is_certain(self) -> bool:
        """Whether the audit is sure of it."""
        return self.sure == "certain"


class Diagnosis(msgspec.Struct):
    """Why a run could not be audited to its end, in the fields of the audit's ``Failure``."""

    how: str
    reason: str
    cause: str
    cure: str
    advice: str

    @property
    def what(self) -> str:
        """What happened and why, for every reader."""
        return f"{self.how}: {self.reason} {self.cause}".strip()


class AuditedRun(msgspec.Struct):
    """A run on a number of ranks."""

    ranks: int


class AuditFacts(msgspec.Struct):
    """The entries of ``lab audit --json`` that a mark follows from.

    status : 0 right, 1 faults, 2 could not be audited or cannot tell.
    possible : findings on a condition.
    """

    status: int
    headline: str
    failure: str | None
    unknown: list[str]
    findings: list[AuditFinding]
    runs: list[AuditedRun]
    possible: list[AuditFinding] = []
    diagnosis: Diagnosis | None = None

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


class Try(msgspec.Struct):
    """A command that a script refused, and what came of it."""

    command: str
    failure: str


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a part, without any judgement.

    Parameters
    ----------
    key : of all that they follow from.
    used : the collectives that its ranks called, and "ddp".
    whole : whether all ranks that trained came to the audit's end.
    doubts : why the records may not be what the probe wrote, or are not all.
    script : its path in the submission.
    command : of which all this was seen.
    changes : in what it differs from the demanded command; see demands.py.
    refused : whether the script refused it, too.
    tries : the other commands that it refused.
    """

    key: str
    audit: AuditFacts
    used: list[str]
    whole: bool
    doubts: list[str]
    seconds: float
    script: str = ""
    command: str = ""
    changes: list[str] = []
    refused: bool = False
    tries: list[Try] = []
