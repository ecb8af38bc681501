"""Whether a cell's strategy that claims to be exact gave every rank the mean, by its runs' records.

The engine records in a run's first step how what each rank's optimiser got comes from all ranks'
own gradients (common/training_engine/claim.py); ``lab.evidence`` says what that shows.
``claim_of(cell)`` collects it over the repeats, findings.py has the sentences. What no run recorded
is not checked: it is never called right.
"""

from dataclasses import dataclass

from common.profiling.records import GradientClaim
from common.utils.gradient_fit import as_matrix
from lab.comparison.record import Cell
from lab.evidence import Evidence, Judgement, judge


@dataclass(frozen=True)
class Seen:
    """What one run's claim shows."""

    step: int
    evidence: Evidence
    judgement: Judgement


@dataclass(frozen=True)
class CellClaim:
    """What is known of a cell's claim to be exact; nothing if it makes none.

    seen : of a repeat in which the ranks got something else; else, if every repeat shows that every
    rank got the mean, of the one with the greatest residue. why_not : why it is not known.
    unequal_ranks : whether ranks ended with different weights.
    """

    seen: Seen | None = None
    why_not: str = ""
    unequal_ranks: bool = False

    @property
    def right(self) -> bool:
        return self.seen is not None and not self.wrong

    @property
    def wrong(self) -> bool:
        """Whether the strategy does not compute what it claims."""
        return self.unequal_ranks or (self.seen is not None and not self.seen.judgement.right)


def claim_of(cell: Cell, *, emulated: bool) -> CellClaim:
    """Return what the repeats of a cell show: a wrong one counts, then an unknown one.

    emulated : whether compute was, so that there are no gradients.
    """
    if not cell.exact or cell.sync == "none" or not cell.runs:
        return CellClaim()
    seen, why_not = _shown([run.claim for run in cell.runs], emulated=emulated)
    return CellClaim(seen, why_not, not all(run.equal_weights for run in cell.runs))


def _shown(claims: list[GradientClaim | None], *, emulated: bool) -> tuple[Seen | None, str]:
    """Return ``seen`` and ``why_not`` of a cell with these claims."""
    seen = [_seen(claim) for claim in claims if claim is not None and claim.weights is not None]
    wrong = [one for one in seen if not one.judgement.right]
    if wrong:
        return wrong[0], ""
    if len(seen) < len(claims):
        return None, _why_not(claims, emulated=emulated)
    return max(seen, key=lambda one: one.evidence.residue), ""


def _seen(claim: GradientClaim) -> Seen:
    """Return what a claim with weights shows."""
    weights = as_matrix(claim.weights or [])
    evidence = Evidence(weights, claim.residue or 0.0, rounded=claim.rounded)
    return Seen(claim.step, evidence, judge(evidence))


def _why_not(claims: list[GradientClaim | None], *, emulated: bool) -> str:
    """Return why at least one of a cell's repeats does not show what the ranks got."""
    if emulated:
        return "emulated compute has no gradients"
    for claim in claims:
        if claim is not None and claim.why_not:
            return claim.why_not
    return "the runs are of an earlier version, which did not record it"
