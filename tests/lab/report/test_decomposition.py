"""The steps between strategies add up to the whole difference, also in the sample report."""

from pathlib import Path
from statistics import fmean

import pytest

from common.sync import STRATEGIES
from lab.comparison.record import read_comparison
from lab.report.causes import apart, beside, decomposition, missing, why
from lab.report.timeline import hidden_seconds
from lab.report.verdict import verdict
from lab.report.view import blocks, steady, tied
from tests.helpers.report_samples import on, results, set_times

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "reports" / "samples" / "compare-digits-1gbit" / "results.json"


def rows_of(*cells):
    data = results(predict=False)
    data.cells = list(cells)
    data.timelines = {}
    (block,) = blocks(data)
    return block.measured


@pytest.fixture(scope="module")
def sample():
    comparison = read_comparison(SAMPLE)
    (block,) = blocks(comparison)
    return comparison, block


def test_the_sample_s_steps_add_up_to_its_headline(sample):
    """The numbers on the right are computed from the file alone."""
    comparison, block = sample
    means = {}
    for cell in comparison.cells:
        steps = [fmean(rank.seconds.step for rank in run.ranks) for run in cell.runs]
        means[cell.sync] = fmean(steps)
    steps = decomposition(block.at(4))
    assert [(gap.slower.sync, gap.faster.sync, gap.apart) for gap in steps] == [
        ("gather_scatter", "all_reduce", ["way"]),
        ("all_reduce", "overlapped", ["pieces", "leave"]),
    ]
    whole = means["gather_scatter"] - means["overlapped"]
    assert sum(gap.seconds for gap in steps) == pytest.approx(whole, abs=1e-12)
    root, rest = steps
    assert root.seconds == pytest.approx(means["gather_scatter"] - means["all_reduce"], abs=1e-12)
    assert root.seconds / whole == pytest.approx(0.885, abs=0.001)
    assert rest.seconds / whole == pytest.approx(0.115, abs=0.001)
    assert missing(rest) == ["all_reduce_flat"]
    # rank 0's first message leaves at 0.068 s, and its last gradient comes at 0.163 s
    assert rest.faster.timeline is not None
    assert hidden_seconds(rest.faster.timeline.ranks) == pytest.approx(0.095, abs=0.001)
    answer = verdict(block, [])
    _, first, *_ = answer.why.splitlines()
    assert "from gather_scatter to all_reduce" in first, "the greatest step is named first"


def test_the_assignment_s_pair_is_compared_although_the_chain_passes_it_by(sample):
    _, block = sample
    rows = block.at(4)
    pairs = {(gap.slower.sync, gap.faster.sync): gap for gap in beside(rows, decomposition(rows))}
    assert pairs.keys() == {("ddp", "overlapped"), ("all_reduce", "ddp")}
    assert pairs["ddp", "overlapped"].uncertain
    assert pairs["ddp", "overlapped"].apart == ["code"]
    assert pairs["all_reduce", "ddp"].seconds == pytest.approx(0.174, abs=0.001)
    assert not pairs["all_reduce", "ddp"].uncertain


def test_a_measured_strategy_separates_what_was_together():
    rows = rows_of(*on(4, "gather_scatter", "all_reduce", "all_reduce_flat", "overlapped", "ddp"))
    steps = decomposition(rows)
    assert [gap.apart for gap in steps] == [["way"], ["pieces"], ["leave"], ["code"]]
    assert all(missing(gap) == [] for gap in steps)
    slowest, fastest = max(rows, key=lambda row: row.seconds), min(rows, key=lambda r: r.seconds)
    assert sum(gap.seconds for gap in steps) == pytest.approx(slowest.seconds - fastest.seconds)


def test_steps_within_the_noise_are_said_to_be():
    cells = on(4, "gather_scatter", "all_reduce", "all_reduce_flat")
    for entry, seconds in zip(cells, (0.5, 0.402, 0.4), strict=True):
        set_times(entry, seconds, high=seconds + 0.01)
    first, second = decomposition(rows_of(*cells))
    assert (first.uncertain, second.uncertain) == (False, True)
    assert first.interval == pytest.approx((0.078, 0.118))
    assert second.interval == pytest.approx((-0.018, 0.022))
    assert "within the noise" in why(second)
    assert "within the noise" not in why(first)


def test_every_pair_of_strategies_differs_in_something():
    names = [name for name in STRATEGIES if name != "none"]
    for first in names:
        same = [other for other in names if other != first and not apart(first, other)]
        assert not same, first
    assert apart("ddp", "ddp-9") == ["bucket"]
    assert apart("ring", "of_a_student") == apart("of_a_student", "ring")


def test_a_tie_names_all_that_lie_in_it_and_a_noisy_one_last():
    cells = on(4, "ring", "tree", "ddp", "overlapped")
    times = {"ring": (0.4, 0.9), "tree": (0.5, 0.51), "ddp": (0.505, 0.515), "overlapped": (1, 1.1)}
    for entry in cells:
        set_times(entry, times[entry.sync][0], high=times[entry.sync][1])
    rows = rows_of(*cells)
    assert [row.sync for row in tied(rows)] == ["tree", "ddp", "ring"]
    assert steady(rows)[0].sync == "tree"
    assert [gap.slower.sync for gap in decomposition(rows)][:1] == ["overlapped"]


def test_a_number_s_interval_lies_around_it():
    """With repeats of 1, 1 and 4 s the median would lie at the edge of the mean's interval."""
    [entry] = on(4, "ring", iteration=1.5)
    for run, seconds in zip(entry.repeats, (1.0, 1.0, 4.0), strict=True):
        run.mean_iteration_seconds = seconds
    [row] = rows_of(entry)
    low, high = row.interval("seconds")
    assert row.seconds == pytest.approx(2.0)
    assert (low, high) == (0, pytest.approx(2 + 4.302653))
    assert row.step == pytest.approx(fmean(run.ranks[0].seconds.step for run in entry.repeats))
    low, high = row.interval("step")
    assert (low + high) / 2 == pytest.approx(row.step)


def test_iterations_are_compared_only_if_every_run_has_them():
    cells = on(4, "ring", "ddp", iteration=1.5)
    assert [row.by_iterations for row in rows_of(*cells)] == [True, True]
    cells[0].repeats[0].mean_iteration_seconds = None
    assert [row.seconds == row.step for row in rows_of(*cells)] == [True, True]
