"""``verdict``: does the script equal one process that computes each rank's share and averages?"""

from collections.abc import Sequence

from lab.audit.findings import gradients, weights
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import Recording
from lab.audit.result import EqualityVerdict

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


def verdict(
    recordings: Sequence[Recording], findings: Sequence[Finding], unknown: Sequence[str] = ()
) -> EqualityVerdict:
    """Return the verdict on all runs of a script.

    Parameters
    ----------
    findings : of all checks.
    unknown : sentences on what could not be judged; those on gradients and weights count.
    """
    faults = [one for one in findings if one.name in UNEQUAL]
    certain = [one for one in faults if one.sure == "certain"]
    if faults:
        one = (certain or faults)[0]
        title = one.entry.title[:1].lower() + one.entry.title[1:]
        likely = "" if certain else "probably "
        return EqualityVerdict("no", f"{likely}{title}{_sizes(one)}")
    reasons = [*unknown, *(text for one in recordings for text in _open(one))]
    reasons = [one for one in reasons if one.startswith(("gradients: ", "weights: "))]
    if any(one.name == "collectives-differ" for one in findings):
        reasons.append("gradients: the ranks do not call the same collectives")
    if not recordings:
        reasons.append("gradients: nothing was recorded")
    if reasons:
        return EqualityVerdict("cannot tell", reasons[0].partition(": ")[2])
    why = "in all steps each optimiser got the mean of the ranks' gradients, from equal weights"
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


def _open(recording: Recording) -> list[str]:
    """Return what a run leaves open about its gradients and weights."""
    outcomes = [*gradients.check(recording), *weights.check(recording)]
    texts = [one.text for one in outcomes if isinstance(one, Unknown)]
    if not texts and not any(isinstance(one, Right) for one in outcomes):
        texts = ["gradients: no step could be compared"]
    return texts


def _has_batchnorm(recording: Recording) -> bool:
    return any(one.get("batchnorm") for rank in recording.ranks for one in rank.by_kind["eval"])
