"""lab/audit/findings/unapplied.py: gradients that no optimiser applies, told from records."""

import numpy as np
import pytest

from lab.audit.findings.unapplied import check
from tests.lab.audit.recordings import train

OWN = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
"""The gradients that two ranks computed."""


def recorded(held, *, steps=8, numbers=30, names=("head.weight", "head.weight")):
    """Return the recording of a training that leaves a parameter out; ``held`` is its .grad."""
    run = train(size=2)
    for rank, name in zip(run.ranks, names, strict=True):
        samples = {"own": rank.keep(OWN[rank.rank]), "held": rank.keep(held[rank.rank])}
        at = ["main.py", 4, "Net()"]
        numbered = {"steps": steps, "numbers": numbers, "every": 100}
        rank.record("unapplied", names=[name], at=at, **numbered, **samples)
    return run


def test_gradients_that_are_exchanged_and_not_applied_are_a_fault():
    (found,) = check(recorded(np.full((2, 3), 2.0)))
    assert found.name == "in-no-optimizer"
    assert found.at.line == 4
    assert "head.weight; 30%" in found.evidence[0]
    assert "all 8 steps" in found.evidence[0]


@pytest.mark.parametrize("left", [{"held": OWN}, {"held": np.full((2, 3), 2.0), "numbers": 60}])
def test_a_part_may_be_left_out_on_purpose(left):
    """Nobody exchanges its gradients, or it is most of the model."""
    assert [one.name for one in check(recorded(**left))] == ["trains-a-part"]


@pytest.mark.parametrize("more", [{"steps": 2}, {"names": ("head.weight", "body.weight")}])
def test_few_steps_and_other_parameters_on_each_rank_say_nothing(more):
    assert not list(check(recorded(np.full((2, 3), 2.0), **more)))
