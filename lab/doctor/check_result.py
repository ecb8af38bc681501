"""What a check returns: ``ok``, ``warning`` or ``failure``, each with its text and remedy."""

from dataclasses import dataclass
from functools import partial

# A run can start; a run can start, but may be slow, mislead or stop later; a run would fail.
OK = "ok"
WARNING = "warning"
FAILURE = "failure"


@dataclass(frozen=True)
class CheckResult:
    """What a check found: a status, a sentence, and what to do unless all is well."""

    status: str
    text: str
    remedy: str = ""


ok = partial(CheckResult, OK)
warning = partial(CheckResult, WARNING)
failure = partial(CheckResult, FAILURE)
