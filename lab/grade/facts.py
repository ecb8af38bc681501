"""What was seen of a part: ``Facts``, which part.py writes and marks.py reads.

They hold all that ``lab audit --json`` writes.
"""

import msgspec

from lab.audit.report import AuditContent, DiagnosisContent

# Statuses of an audit.
FOUND_FAULTS = 1
CANNOT_TELL = 2


class Look(msgspec.Struct):
    """Why a person has to look at a part.

    what : what was seen, for both readers.
    student, grader : what each of them can do; "" if nothing. Neither reads the other's sentence.
    missing : whether nothing was handed in that may be the part.
    """

    what: str
    student: str = ""
    grader: str = ""
    missing: bool = False

    @property
    def for_student(self) -> str:
        """What the student's page says."""
        return f"{self.what} {self.student}".strip()

    @property
    def for_grader(self) -> str:
        """What the class's page says."""
        return f"{self.what} {self.grader}".strip()


def what_ended(diagnosis: DiagnosisContent) -> str:
    """Return why a run could not be audited to its end, for every reader."""
    return f"{diagnosis.how}: {diagnosis.reason} {diagnosis.cause}".strip()


class Try(msgspec.Struct):
    """A command that a script refused, and what came of it."""

    command: str
    failure: str


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a part, without any judgement.

    Parameters
    ----------
    key : of all that they follow from.
    used : the collectives by which its ranks sent more than next to nothing, and "ddp".
    whole : whether all ranks that trained came to the audit's end.
    doubts : why the records may not be what the probe wrote, or are not all.
    script : its path in the submission.
    command : of which all this was seen.
    changes : in what it differs from the demanded command; see demands.py.
    refused : whether the script refused it, too.
    tries : the other commands that it refused.
    """

    key: str
    audit: AuditContent
    used: list[str]
    whole: bool
    doubts: list[str]
    seconds: float
    script: str = ""
    command: str = ""
    changes: list[str] = []
    refused: bool = False
    tries: list[Try] = []
