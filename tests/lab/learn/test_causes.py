"""Causes are told from what each rank's gradient is made of, without any rank."""

import pytest
import torch

from lab.audit.findings.finding import catalogue
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
        ([[1 / 2] * 3] * 3, "literal-divisor", "divided by 2"),
        ([[1 / 9] * 3] * 3, "averaged-twice", "0.333 times the mean"),
        ([[0.21] * 3] * 3, "not-the-mean", "by a wrong number"),
        ([[0] * 3] * 3, "not-the-mean", "zero"),
        (OWN, "own-gradient", "a copy"),
        ([[1, 0, 0]] * 3, "own-gradient", "every rank gets rank 0's"),
        ([MEAN[0], *OWN[1:]], "own-gradient", "the mean comes to rank 0 only"),
        ([*MEAN[:2], OWN[2]], "own-gradient", "the mean comes to ranks 0 and 1 only"),
        ([[0, 1 / 3, 1 / 3]] * 3, "not-the-mean", "rank 0's own gradient is missing"),
        ([[1 / 3, 2 / 3, 1 / 3]] * 3, "not-the-mean", "rank 1's gradient is counted twice"),
        ([[0, 1, 0], [0, 0, 1], [1, 0, 0]], "not-the-mean", "nothing is added up"),
        (
            [[0, 1 / 2, 1 / 2], [1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0]],
            "not-the-mean",
            "leaves its own gradient out",
        ),
    ],
)
def test_a_matrix_of_shares_has_one_cause(shares, finding, words):
    told = cause(shares, shares)
    assert words in told
    assert f"(lab audit calls this {finding}.)" in told
    assert finding in catalogue()


def test_the_mean_has_no_cause():
    assert cause(MEAN, MEAN) is None


def test_own_gradients_of_silent_ranks_are_not_called_a_copy():
    assert "group-unused" in cause(OWN, OWN, exchanged=False)


def test_a_part_that_keeps_its_own_gradient_is_left_out():
    told = cause(MEAN, OWN)
    assert "some-parameters" in told
    assert "left out: b:" in told
    assert "some-parameters" not in cause(MEAN, [[1] * 3] * 3)


def test_what_is_no_sum_of_the_gradients_is_said_to_be_none():
    before = torch.randn(3, 20, dtype=torch.float64)
    after = before.mean(0).roll(1).expand(3, 20)
    assert "no weighted sum of the ranks' gradients" in cause_of(parts_of(after, before, LENGTHS))


def test_three_ranks_come_first_since_on_two_many_causes_look_alike():
    assert SIZES[0] == 3
    assert min(SIZES) == 2
