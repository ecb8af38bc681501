"""What the card at the end of a run says of the optimisers' gradients."""

import pytest

from common.profiling.records import GradientClaim
from common.reporting.summary import claim_text

MEAN = [[0.5, 0.5], [0.5, 0.5]]
SUM = [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("claim", "right"),
    [
        (GradientClaim(step=1, weights=MEAN, residue=1e-7), True),
        (GradientClaim(step=1, weights=MEAN, residue=1e-3, rounded=True), True),
        (GradientClaim(step=1, weights=MEAN, residue=1e-3), False),
        (GradientClaim(step=1, weights=SUM, residue=1e-7), False),
        (GradientClaim(step=1, weights=[[0.5, 0.5], None], residue=1e-7), False),
        (GradientClaim(step=1, weights=[[1.0, 0.0], [0.0, 1.0]], residue=1e-7), False),
    ],
)
def test_only_the_mean_is_called_the_mean(claim, right):
    assert claim_text(claim).startswith("every rank got the mean" if right else "NOT the mean")


def test_what_was_not_seen_is_not_called_right():
    text = claim_text(GradientClaim(step=0, why_not="the strategy is lossy"))
    assert text == "not checked for the mean: the strategy is lossy"
