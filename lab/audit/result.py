"""``AuditResult``: all that an audit has to say, and its verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lab.audit.findings.finding import FAULT, Finding
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
    right, unknown : sentences on what was checked and is right, and on what could not be checked.
    remarks : on the runs themselves, e.g. that the script fixes its number of ranks.
    performance : of the largest run, see performance.py; empty if nothing was measured.
    failure : why a run could not be audited, or not to its end, and what to try; None if all could.
    """

    command: str
    recordings: Sequence[Recording]
    findings: Sequence[Finding]
    verdict: EqualityVerdict
    right: Sequence[str] = ()
    unknown: Sequence[str] = ()
    remarks: Sequence[str] = ()
    performance: Mapping[str, Any] | None = None
    failure: str | None = None

    @property
    def faults(self) -> list[Finding]:
        """The findings that make the exit status 1."""
        return [one for one in self.findings if one.entry.severity == FAULT]

    @property
    def status(self) -> int:
        """The exit status: 0 right, 1 faults, 2 could not be audited or cannot tell.

        Before the first step only a fault that makes the ranks fail counts: what else was found
        may be no fault of the training that never began.
        """
        began = self.failure is None or any(one.steps for one in self.recordings)
        counts = [one for one in self.faults if began or one.entry.fails]
        right = self.failure is None and self.verdict.answer == "yes"
        return 1 if counts else 0 if right else 2

    @property
    def headline(self) -> str:
        """The gravest fault, else why it did not run to the end, "right" or "cannot tell"."""
        if self.status == 1:
            probably, fault = _gravest(self.faults)
            return f"{probably}wrong: {fault}"
        unsure = f"cannot tell: {self.verdict.why}"
        sizes = {one.size for one in self.recordings}
        on = "" if len(sizes) > 1 else f" on {ranks_text(sizes)}"  # a literal divisor hides there
        return self.failure or (unsure if self.status else f"right{on}: no fault was found")


def verdict(
    recordings: Sequence[Recording],
    findings: Sequence[Finding],
    unknown: Sequence[str] = (),
    *,
    failure: str | None = None,
) -> EqualityVerdict:
    """Return the verdict on all runs of a script.

    Parameters
    ----------
    findings : of all checks.
    unknown : sentences on what could not be checked; those on gradients and weights count.
    failure : why a run could not be audited to its end: then only "no" is certain.
    """
    if faults := [one for one in findings if one.entry.unequal]:
        return EqualityVerdict("no", "".join(_gravest(faults)))
    of_these = ("gradients: ", "weights: ")
    reasons = [one.partition(": ")[2] for one in unknown if one.startswith(of_these)]
    if any(one.name == "collectives-differ" for one in findings):
        reasons.append("the ranks do not call the same collectives")
    elif failure is not None or not recordings:
        reasons.insert(0, "the script could not be run to the end of the audit")
    if reasons:
        return EqualityVerdict("cannot tell", reasons[0])
    why = "the ranks start equal, and every watched update uses the mean of their gradients"
    if any(one.name == "same-samples" for one in findings):
        why += "; but the ranks train on the same samples"
    ranks = [rank for recording in recordings for rank in recording.ranks]
    if any(one.get("batchnorm") for rank in ranks for one in rank.by_kind["eval"]):
        why += (
            "; each rank's BatchNorm uses the statistics of its own share, so the mean of the "
            "shares rightly differs from one pass over the whole batch"
        )
    return EqualityVerdict("yes", why)


def _gravest(found: Sequence[Finding]) -> tuple[str, str]:
    """Return "probably " or "", and the first that is certain, else the first: a clause each.

    What explains others comes first.
    """
    one = next((one for one in found if one.sure == "certain"), found[0])
    title = titled(one)
    if title.split()[0].istitle():  # not a name such as DistributedDataParallel
        title = title[:1].lower() + title[1:]
    return "" if one.sure == "certain" else "probably ", title


def titled(finding: Finding) -> str:
    """Return what was found, and on how many ranks."""
    title = finding.entry.title
    return f"{title} ({ranks_text(finding.sizes)})" if finding.sizes else title


def ranks_text(sizes: Iterable[int]) -> str:
    """Return "2 and 3 ranks" or "1 rank"; "no ranks" without any."""
    numbers = " and ".join(str(size) for size in sorted(set(sizes)))
    return f"{numbers or 'no'} {'rank' if numbers == '1' else 'ranks'}"
