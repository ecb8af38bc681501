"""Proofs that gradient synchronisation is right.

``check_equivalence`` compares a strategy with one process on the whole batch.
"""

from lab.proofs.equivalence import Equivalence, StepDifference, check_equivalence, check_group
from lab.proofs.proof_model import Case
from lab.proofs.ranks import RankError, run_ranks

__all__ = [
    "Case",
    "Equivalence",
    "RankError",
    "StepDifference",
    "check_equivalence",
    "check_group",
    "run_ranks",
]
