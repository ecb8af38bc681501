"""How a cell's status, medians and intervals follow from its repeats."""

import math

import pytest

from common.runs import RankRow
from common.utils.typed_json import convert
from lab.comparison.cell import interval, new_cell, summarise
from lab.comparison.record import Repeat
from tests.helpers.fake_part import rank_rows

FAILED = Repeat(folder="f", seed=0, status="failed", message="why", ranks=[])


def done(step=1.0, **more):
    """Return a repeat whose ranks have these arguments of ``rank_rows``."""
    ranks = convert(rank_rows(step, **more), list[RankRow], name="ranks")
    return Repeat(folder="f", seed=0, status="done", ranks=ranks)


def summary(*repeats):
    """Return the cell of these repeats, of which two are enough."""
    cell = new_cell("ring", 2, batch_size=64)
    cell.repeats += repeats
    summarise(cell, repeats=2)
    return cell


def test_median_over_repeats_of_the_mean_over_ranks():
    """Bytes that no timeline counted are unknown, not zero."""
    medians = summary(*(done(step, ranks=3) for step in (1.0, 2.0, 9.0))).medians
    assert medians.step == 3.0  # the middle repeat's mean over 2, 3 and 4
    assert (medians.root_bytes_sent, medians.others_bytes_sent) == (5.0, 2.0)
    assert medians.peak_memory_bytes == 101.0
    medians = summary(done(sent=(None, None))).medians
    assert (medians.root_bytes_sent, medians.others_bytes_sent) == (None, None)


def test_interval_is_students_t():
    """By hand: mean 2, standard deviation 1, t(0.975, 2) = 4.3027."""
    low, high = interval([1.0, 2.0, 3.0])
    assert high == pytest.approx(2 + 4.302653 / math.sqrt(3), rel=1e-6)
    assert low == 0.0, "no time is negative"
    assert interval([1.0]) == (None, None)
    assert interval([4.0, 4.0]) == (4.0, 4.0)


def test_status_tells_how_much_is_there():
    cells = [summary(), summary(FAILED), summary(done(), FAILED), summary(done())]
    cells.append(summary(done(), done()))
    assert [(cell.status, cell.message, cell.medians is None) for cell in cells] == [
        ("pending", None, True),
        ("failed", "why", True),
        ("partial", "why", False),
        ("partial", None, False),
        ("done", None, False),
    ]
