"""``AuditResult``: all that an audit has to say, and its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lab.audit.findings.finding import Finding
from lab.audit.recording import Recording

UNEQUAL = (
    "group-unused", "ddp-bypassed", "weights-averaged", "clipped-before-averaging",
    "value-clipped-before-averaging", "averaged-twice", "scaled-in-loss", "sum-not-mean",
    "literal-divisor", "some-parameters", "stale-gradient", "own-gradient", "not-the-mean",
    "different-start", "weights-diverge", "different-learning-rates", "different-optimizer-state",
)  # fmt: skip
"""Findings with which the ranks train something else than one process would."""
BATCHNORM = (
    "each rank's BatchNorm uses the statistics of its own share, so the mean of the shares rightly"
    " differs from one pass over the whole batch"
)


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
    right, unknown : sentences on what was checked and is right, and on what could not be checked.
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


def verdict(
    recordings: Sequence[Recording], findings: Sequence[Finding], unknown: Sequence[str] = ()
) -> EqualityVerdict:
    """Return the verdict on all runs of a script.

    Parameters
    ----------
    findings : of all checks.
    unknown : sentences on what could not be checked; those on gradients and weights count.
    """
    faults = [one for one in findings if one.name in UNEQUAL]
    certain = [one for one in faults if one.sure == "certain"]
    if faults:
        one = (certain or faults)[0]
        title = one.entry.title[:1].lower() + one.entry.title[1:]
        likely = "" if certain else "probably "
        return EqualityVerdict("no", f"{likely}{title}{_sizes(one)}")
    reasons = [one for one in unknown if one.startswith(("gradients: ", "weights: "))]
    if any(one.name == "collectives-differ" for one in findings):
        reasons.append("gradients: the ranks do not call the same collectives")
    if not recordings:
        reasons.append("gradients: nothing was recorded")
    if reasons:
        return EqualityVerdict("cannot tell", reasons[0].partition(": ")[2])
    why = "the ranks start equal, and every watched update uses the mean of their gradients"
    if any(one.name == "same-samples" for one in findings):
        why += "; but the ranks train on the same samples"
    if any(_has_batchnorm(one) for one in recordings):
        why += f"; {BATCHNORM}"
    return EqualityVerdict("yes", why)


def _sizes(one: Finding) -> str:
    if not one.sizes:
        return ""
    listed = " and ".join(str(size) for size in one.sizes)
    return f" ({listed} ranks)"


def _has_batchnorm(recording: Recording) -> bool:
    return any(one.get("batchnorm") for rank in recording.ranks for one in rank.by_kind["eval"])
