"""lab/audit/findings/weights.py: what the ranks load, told from records."""

import numpy as np
import pytest

from lab.audit.findings.finding import Right
from lab.audit.findings.weights import check
from lab.audit.records import Load, Step, Weights
from tests.lab.audit.recordings import COLUMNS, gradients, mean, train


def told(run):
    """Return the names of what is found, and the properties that hold."""
    outcomes = list(check(run))
    held = [one.of for one in outcomes if isinstance(one, Right)]
    return [one.name for one in outcomes if not isinstance(one, Right)], held


def load(rank, *, step=0, matched=4, missing=0, unexpected=0):
    names = ["fc.weight", "module.fc.weight"]
    keys = {"matched": matched, "missing": missing, "unexpected": unexpected}
    rank.record("load", step=step, names=names, at=["main.py", 3, "load"], **keys)


@pytest.mark.parametrize(
    ("matched", "missing", "unexpected", "sure"),
    [
        (4, 0, 0, None),
        (2, 300, 0, None),  # the weights of an adapter
        (2, 0, 300, None),  # a part of a larger model
        (300, 2, 2, None),  # another head
        (0, 4, 4, "certain"),
        (0, 4, 0, "certain"),  # an empty one
        (1, 3, 3, "likely"),
    ],
)
def test_a_state_dict_fits_or_not(matched, missing, unexpected, sure):
    run = train(size=2)
    for rank in run.ranks:
        load(rank, matched=matched, missing=missing, unexpected=unexpected)
    found = [one for one in check(run) if not isinstance(one, Right)]
    assert [one.sure for one in found] == [sure] * (sure is not None)
    assert all(one.name == "loads-nothing" and one.at.line == 3 for one in found)
    assert ("loads" in told(run)[1]) == (sure is None)


def shrunk(own, step):
    """Return the mean, but rank 1's weights part by what it gets in step 2."""
    got = mean(own, step)
    got[1] *= 1 if step != 2 else 0.5
    return got


@pytest.mark.parametrize(
    ("step", "ranks", "name"),
    [
        (3, [0], "weights-diverge"),  # the last gradients differed, so the update is to blame
        (1, [0], "weights-diverge"),  # at another time
        (3, [], "weights-diverge"),
    ],
)
def test_weights_that_part_by_an_update_are_not_said_to_be_loaded(step, ranks, name):
    run = train(shrunk, size=2)
    for rank in ranks:
        load(run.ranks[rank], step=step)
    assert told(run)[0] == [name]


@pytest.mark.parametrize(("before", "name"), [(True, "loads-differ"), (False, "different-start")])
def test_a_load_after_steps_of_another_model_explains_a_different_start(before, name):
    run = train(size=2)
    first = run.ranks[1].of(Weights)[0]
    run.ranks[1]._numbers[slice(first.values[0], first.values[0] + 50)] += 1
    load(run.ranks[1], step=20)
    run.ranks[1].of(Load)[0].t = first.t - 1 if before else first.t + 1
    assert told(run)[0][0] == name


def halved_on_rank_0(own, step):
    """Return the mean, of which rank 0 halves the last parameter."""
    got = mean(own, step)
    got[0, COLUMNS - 10 :] *= 0.5
    return got


@pytest.mark.parametrize(
    ("arrives", "exchange", "apart", "names"),
    [
        (mean, halved_on_rank_0, 0, ["shared-part-diverges"]),
        (mean, mean, 0, []),
        (lambda own, _: own, halved_on_rank_0, 0, []),  # nothing was exchanged
        (mean, halved_on_rank_0, COLUMNS, []),  # nothing starts equal
    ],
)
def test_a_part_that_starts_equal_and_is_exchanged_stays_equal(arrives, exchange, apart, names):
    run = train(exchange, size=2)
    for rank in run.ranks:
        for step in rank.of(Step):
            own = np.array([gradients(number, step.step) for number in range(2)])
            step.unclipped = rank.keep(arrives(own, step.step)[rank.rank])
    other = run.ranks[1]
    for record in other.of(Weights):
        begin = record.values[0]
        other._numbers[begin : begin + max(apart, 216)] += 1
    found = [one for one in check(run) if not isinstance(one, Right)]
    parts = [one for one in found if one.name == "shared-part-diverges"]
    assert [one.name for one in parts] == names
    assert all("fc.bias;" in one.evidence[0] for one in parts)
