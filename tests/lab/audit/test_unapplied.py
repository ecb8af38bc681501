"""lab/audit/findings/unapplied.py: gradients that no optimiser applies, told from records."""

import pytest

from lab.audit.findings.unapplied import check
from tests.lab.audit.recordings import COLUMNS, train


def recorded(*, steps=8, numbers=30, every=COLUMNS, names=("head.weight", "head.weight")):
    """Return the recording of a training that exchanges all gradients, and leaves some unused."""
    run = train(size=2)
    for rank, name in zip(run.ranks, names, strict=True):
        at = ["main.py", 4, "Net()"]
        rank.record("unapplied", names=[name], steps=steps, numbers=numbers, every=every, at=at)
    return run


def test_gradients_that_are_exchanged_and_not_applied_are_a_fault():
    (found,) = check(recorded())
    assert found.name == "in-no-optimizer"
    assert found.at.line == 4
    assert f"head.weight; {30 / COLUMNS:.0%}" in found.evidence[0]
    assert "all 8 steps" in found.evidence[0]


@pytest.mark.parametrize("left", [{"every": COLUMNS + 1}, {"numbers": COLUMNS // 2 + 1}])
def test_a_part_may_be_left_out_on_purpose(left):
    """Nobody exchanges its gradients, or it is most of the model."""
    assert [one.name for one in check(recorded(**left))] == ["trains-a-part"]


@pytest.mark.parametrize("more", [{"steps": 2}, {"names": ("head.weight", "body.weight")}])
def test_few_steps_and_other_parameters_on_each_rank_say_nothing(more):
    assert not list(check(recorded(**more)))
