"""Whether strategies that claim to be exact gave every rank the mean, as their runs recorded it.

The engine records in a run's first step how what each rank's optimiser got comes from all ranks'
own gradients (common/training_engine/claim.py); ``lab.evidence`` says what that shows.
``check(block, nodes)`` collects it for the strategies on one number of nodes, findings.py has the
sentences. What no run recorded is not checked: it is never called right.
"""

from dataclasses import dataclass, field

from common.profiling.records import GradientClaim
from common.utils.gradient_fit import as_matrix
from lab.evidence import Evidence, Judgement, judge
from lab.report.view import CellRow, ComparisonGroup


@dataclass(frozen=True)
class Seen:
    """What one run's claim shows. residue : the greatest relative error of ``evidence``'s sums."""

    step: int
    residue: float
    evidence: Evidence
    judgement: Judgement


@dataclass
class Claims:
    """What is known of the strategies that claim to be exact, by their names.

    right : every rank got the mean, in each repeat; that with the greatest residue. wrong : a
    repeat in which the ranks got something else. unchecked : why it is not known. unequal_ranks :
    the strategies whose ranks ended with different weights.
    """

    right: dict[str, Seen] = field(default_factory=dict)
    wrong: dict[str, Seen] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    unequal_ranks: list[str] = field(default_factory=list)

    @property
    def contradicted(self) -> set[str]:
        """The strategies that do not compute what they claim."""
        return {*self.wrong, *self.unequal_ranks}


def check(block: ComparisonGroup, nodes: int) -> Claims:
    """Return what the runs on ``nodes`` nodes recorded of the claims to be exact."""
    found = Claims()
    for row in block.at(nodes):
        if not row.exact or row.sync == "none":
            continue
        if not all(run.equal_weights for run in row.runs):
            found.unequal_ranks.append(row.sync)
        _add(row, found, emulated=block.emulated_compute)
    return found


def wrong_rows(block: ComparisonGroup) -> set[CellRow]:
    """Return the rows whose strategy does not compute what it claims on that number of nodes."""
    wrong: set[CellRow] = set()
    for nodes in block.nodes_beyond_one:
        contradicted = check(block, nodes).contradicted
        wrong.update(row for row in block.at(nodes) if row.sync in contradicted)
    return wrong


def _add(row: CellRow, found: Claims, *, emulated: bool) -> None:
    """Add what the repeats of a cell show to ``found``: a wrong one counts, then an unknown one."""
    claims = [run.claim for run in row.runs]
    seen = [_seen(claim) for claim in claims if claim is not None and claim.weights is not None]
    wrong = [one for one in seen if not one.judgement.right]
    if wrong:
        found.wrong[row.sync] = wrong[0]
    elif len(seen) < len(claims):
        found.unchecked[row.sync] = _why_not(claims, emulated=emulated)
    elif row.sync not in found.unequal_ranks:
        found.right[row.sync] = max(seen, key=lambda one: one.residue)


def _seen(claim: GradientClaim) -> Seen:
    """Return what a claim with weights shows."""
    residue = claim.residue or 0.0
    evidence = Evidence(as_matrix(claim.weights or []), residue, rounded=claim.rounded)
    return Seen(claim.step, residue, evidence, judge(evidence))


def _why_not(claims: list[GradientClaim | None], *, emulated: bool) -> str:
    """Return why at least one of a cell's repeats does not show what the ranks got."""
    if emulated:
        return "emulated compute has no gradients"
    for claim in claims:
        if claim is not None and claim.why_not:
            return claim.why_not
    return "the runs are of an earlier version, which did not record it"
