"""lab/audit/findings/ddp.py: what DistributedDataParallel averages, told from records."""

import pytest

from lab.audit.findings.ddp import check
from tests.lab.audit.recordings import mean, train

UNUSED = "Expected to have finished reduction in the prior iteration before starting a new one. And"
TWICE = "Expected to mark a variable ready only once. And"


def recorded(exchange=mean, **missed):
    """Return the recording of a training in which rank 1 misses these parameters from step 2 on."""
    run = train(exchange, size=2)
    run.ranks[0].record("ddp", bytes=8, at=["main.py", 4, "DDP(model)"])
    at = ["main.py", 5, "model.float()"] if "converted" in missed else None
    run.ranks[1].record("missed", step=2, at=at, **missed)
    return run


def nothing_sent(own, step):
    return own


@pytest.mark.parametrize(
    ("message", "name", "parameter"),
    [(UNUSED, "unused-parameters", "aux.bias"), (TWICE, "ready-twice", ""), ("Expected", None, "")],
)
def test_an_error_of_ddp_is_a_fault_at_its_line(message, name, parameter):
    run = recorded(unused=["aux.weight", "aux.bias"])
    at = ["main.py", 9, "model(x)"]
    run.ranks[1].record("error", type="RuntimeError", message=message, at=at)
    found = list(check(run))
    assert [one.name for one in found] == [name] * (name is not None)
    assert all(one.at.line == 9 and parameter in one.evidence[0] for one in found)


def test_an_error_after_the_cut_is_the_audits():
    run = recorded()
    run.ranks[0].record("error", type="RuntimeError", message=UNUSED, after_cut=True)
    assert not list(check(run))


@pytest.mark.parametrize(("how", "line"), [("late", 4), ("converted", 5)])
def test_what_ddp_misses_is_a_fault_only_if_nothing_else_averages_it(how, line):
    (found,) = check(recorded(nothing_sent, **{how: ["fc.weight"]}))
    assert found.name == "ddp-misses-parameters"
    assert found.at.line == line
    assert "step 2" in found.evidence[0]
    assert "fc.weight" in found.evidence[0]
    assert not list(check(recorded(mean, **{how: ["fc.weight"]})))
    assert not list(check(recorded(nothing_sent, unused=["fc.weight"])))
