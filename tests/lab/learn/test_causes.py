"""What a lesson adds to a rule of lab/evidence: parts, silence, and the audit's name.

The rules themselves are tested in tests/lab/evidence.
"""

import pytest
import torch

from lab.audit.findings.finding import catalogue
from lab.evidence import RULES
from lab.learn.causes import cause_of, parts_of
from lab.learn.lessons.averaging import SIZES

LENGTHS = {"a": 8, "b": 12}
MEAN = [[1 / 3] * 3] * 3
OWN = torch.eye(3).tolist()


def cause(*shares, exchanged=True):
    """Return the cause if the ranks hold these shares of the gradients, one matrix a part."""
    before = torch.randn(3, 20, dtype=torch.float64)
    pieces = before.split(list(LENGTHS.values()), dim=1)
    matrices = [torch.tensor(matrix, dtype=torch.float64) for matrix in shares]
    after = torch.cat([m @ piece for m, piece in zip(matrices, pieces, strict=True)], dim=1)
    return cause_of(parts_of(after, before, LENGTHS), exchanged=exchanged)


@pytest.mark.parametrize(
    ("shares", "finding", "words"),
    [
        ([[1] * 3] * 3, "sum-not-mean", "3.000 times the mean on 3 ranks"),
        (OWN, "own-gradient", "a copy"),
        ([*MEAN[:2], OWN[2]], "own-gradient", "the mean comes to ranks 0 and 1 only"),
    ],
)
def test_a_cause_is_what_the_rules_say_with_what_a_rank_got_and_the_audits_name(
    shares, finding, words
):
    told = cause(shares, shares)
    assert words in told
    assert f"(lab audit calls this {finding}.)" in told


def test_the_audit_knows_every_name_that_the_rules_give():
    assert {rule.finding for rule in RULES} - {""} <= catalogue().keys()


def test_the_mean_has_no_cause():
    assert cause(MEAN, MEAN) is None


def test_own_gradients_of_silent_ranks_are_not_called_a_copy():
    assert "group-unused" in cause(OWN, OWN, exchanged=False)


def test_a_part_that_keeps_its_own_gradient_is_left_out():
    told = cause(MEAN, OWN)
    assert "some-parameters" in told
    assert "left out: b:" in told
    assert "some-parameters" not in cause(MEAN, [[1] * 3] * 3)


def test_three_ranks_come_first_since_on_two_many_causes_look_alike():
    assert SIZES[0] == 3
    assert min(SIZES) == 2
