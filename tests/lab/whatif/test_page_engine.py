"""The page's own scripts, in a browser, compute the rows of ``lab predict``."""

import pytest

from common.sync import STRATEGIES
from tests.helpers.browser import needs_browser
from tests.helpers.whatif_states import differences, shared_folder, shared_pages

pytestmark = [needs_browser, pytest.mark.slow]

QUICK = 2 * len(STRATEGIES)  # as in test_engine.py, which shares the states and their rows
MANY = 2000
ROWS = "([data, states]) => states.map((state) => Engine.row(data, state, state.focus))"


@pytest.mark.parametrize(
    "count", [QUICK, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_rows_are_those_of_lab_predict(browser, what_if, tmp_path_factory, worker_id, count):
    """Equal to a relative 1e-9, with all strategies, both scalings, and several ranks a node."""
    pages = shared_pages(shared_folder(tmp_path_factory, worker_id), count)
    assert sum(len(expected.states) for expected in pages) == count
    with browser.page(what_if.path) as page:
        for expected in pages:
            rows = page.evaluate(ROWS, [expected.data, expected.states])
            assert differences(expected, rows)[:5] == []
