"""``AuditResult``: all that an audit has to say, and its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.say import count, counts
from lab.audit.findings.finding import FAULT, Finding
from lab.audit.findings.properties import PropertyRow
from lab.audit.like import Likeness
from lab.audit.performance import Performance
from lab.audit.recording import Recording
from lab.audit.records import CodeLine, Evaluation


@dataclass(frozen=True)
class EqualityVerdict:
    """Whether the script equals one process that computes each rank's share and averages.

    why : one sentence.
    """

    answer: Literal["yes", "no", "cannot tell"]
    why: str


@dataclass(frozen=True)
class Failure:
    """Why a script could not be audited, or not to its end.

    Parameters
    ----------
    reason : what happened, as a sentence, with the script's error and its line.
    how : "could not be run on 2 ranks", for example.
    at : the line of the script at which it happened; None if nothing tells.
    cause, cure : why, and what to change in the script; they suit its author. "" if unknown.
    advice : what to change in the command of ``lab audit``; it suits who runs the audit.
    known_error : the name of the error in lab/explain/known_errors.toml, or None.
    """

    reason: str
    how: str = "could not be run"
    at: CodeLine | None = None
    cause: str = ""
    cure: str = ""
    advice: str = ""
    known_error: str | None = None

    @property
    def text(self) -> str:
        """All of it for who runs the audit, on one line."""
        sentences = (f"{self.how}: {self.reason}", self.cause, self.advice or self.cure)
        return " ".join(filter(None, sentences))


@dataclass(frozen=True)
class AuditResult:
    """What was found in all runs of a script.

    Parameters
    ----------
    command : as typed, with its placeholders.
    recordings : one a number of ranks.
    findings : one a name, faults first.
    possible : what is found on a condition that nobody can tell; it makes no status.
    properties : what was looked at, whether it held, and what was not seen.
    remarks : on the runs themselves, e.g. that the script fixes its number of ranks.
    performance : of the largest run; None if nothing was measured.
    failure : why a run could not be audited, or not to its end; None if all could.
    likeness : how it differs from a right script; None without ``--like``. It makes no status.
    """

    command: str
    recordings: Sequence[Recording]
    findings: Sequence[Finding]
    verdict: EqualityVerdict
    possible: Sequence[Finding] = ()
    properties: Sequence[PropertyRow] = ()
    remarks: Sequence[str] = ()
    performance: Performance | None = None
    failure: Failure | None = None
    likeness: Likeness | None = None

    @property
    def faults(self) -> list[Finding]:
        """The findings that make the exit status 1."""
        return [finding for finding in self.findings if finding.entry.severity == FAULT]

    @property
    def status(self) -> int:
        """The exit status: 0 if all was seen and held, 1 for faults, else 2.

        Before the first step only a fault that makes the ranks fail counts: what else was found
        may be no fault of the training that never began.
        """
        began = self.failure is None or any(recording.steps for recording in self.recordings)
        if any(began or fault.entry.fails for fault in self.faults):
            return 1
        equal = self.failure is None and self.verdict.answer == "yes"
        return 0 if equal and not self.unseen else 2

    @property
    def unseen(self) -> list[PropertyRow]:
        """The properties of which something was not seen."""
        return [row for row in self.properties if row.state == "not seen"]

    @property
    def headline(self) -> str:
        """The gravest fault, else why it did not run to the end, else what was seen and not."""
        if self.status == 1:
            probably, fault = _gravest(self.faults)
            return f"{probably}wrong: {fault}"
        if self.failure:
            return self.failure.text
        if self.verdict.answer != "yes":
            return f"cannot tell: {self.verdict.why}"
        steps = max(recording.steps for recording in self.recordings)
        sizes = counts((recording.size for recording in self.recordings), "rank")
        if self.unseen:
            claims = "; ".join(f"whether {row.claim}: {row.said[0]}" for row in self.unseen)
            return f"no fault in what was watched on {sizes}. Not seen: {claims}"
        return f"right: no fault in {count(steps, 'step')} on {sizes}, to the program's end"


def verdict(
    recordings: Sequence[Recording],
    findings: Sequence[Finding],
    properties: Sequence[PropertyRow] = (),
    *,
    failure: Failure | None = None,
) -> EqualityVerdict:
    """Return the verdict on all runs of a script.

    Parameters
    ----------
    findings : of all checks.
    properties : those of gradients and weights count.
    failure : why a run could not be audited to its end: then only "no" is certain.
    """
    unequal = [finding for finding in findings if finding.entry.unequal]
    if unequal:
        return EqualityVerdict("no", "".join(_gravest(unequal)))
    names = {finding.name for finding in findings}
    reason = _why_unsure(recordings, names, properties, failure)
    if reason is not None:
        return EqualityVerdict("cannot tell", reason)
    why = "the ranks start equal, and every watched update uses the mean of their gradients"
    if "same-samples" in names:
        why += "; but the ranks train on the same samples"
    if any(evaluation.batchnorm_layers for run in recordings for evaluation in run.of(Evaluation)):
        why += (
            "; each rank's BatchNorm uses the statistics of its own share, so the mean of the "
            "shares rightly differs from one pass over the whole batch"
        )
    return EqualityVerdict("yes", why)


def _why_unsure(
    recordings: Sequence[Recording],
    names: set[str],
    properties: Sequence[PropertyRow],
    failure: Failure | None,
) -> str | None:
    """Return the first reason for which nobody can tell; None if there is none.

    names : of the findings.
    """
    collectives_differ = "collectives-differ" in names  # which explains a run that failed
    if not collectives_differ and (failure is not None or not recordings):
        return "the script could not be run to the end of the audit"
    for row in properties:
        if row.name in ("gradients", "weights") and row.state == "not seen":
            return row.said[0]
    return "the ranks do not call the same collectives" if collectives_differ else None


def _gravest(found: Sequence[Finding]) -> tuple[str, str]:
    """Return "" and the first finding that is certain, else "probably " and the first one.

    A finding that explains others comes before these. It is told by its title, in a sentence.
    """
    certain = [finding for finding in found if finding.sure == "certain"]
    gravest = certain[0] if certain else found[0]
    title = in_sentence(titled(gravest.entry.title, gravest.sizes))
    return "" if certain else "probably ", title


def in_sentence(title: str) -> str:
    """Return a title as it stands within a sentence: without its capital, unless that is a name."""
    first_word = title.split()[0]
    if first_word.istitle():  # not a name such as DistributedDataParallel
        return title[:1].lower() + title[1:]
    return title


def titled(title: str, sizes: Sequence[int]) -> str:
    """Return what was found, and on how many ranks."""
    return f"{title} ({counts(sizes, 'rank')})" if sizes else title
