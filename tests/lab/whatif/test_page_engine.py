"""The page's own scripts, in a browser, compute the rows of ``lab predict``."""

import pytest

from tests.helpers.browser import needs_browser
from tests.helpers.whatif_states import differences, shared_folder, shared_pages

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 2000  # as in test_engine.py, which shares the states and their rows
ROWS = "([data, states]) => states.map((state) => Engine.row(data, state, state.focus))"


def test_rows_are_those_of_lab_predict(browser, what_if, tmp_path_factory, worker_id):
    """Equal to a relative 1e-9, with all strategies, both scalings, and several ranks a node."""
    pages = shared_pages(shared_folder(tmp_path_factory, worker_id), COUNT, sampled_ranks=3)
    assert sum(len(expected.states) for expected in pages) == COUNT
    with browser.page(what_if.path) as page:
        for expected in pages:
            rows = page.evaluate(ROWS, [expected.data, expected.states])
            assert differences(expected, rows)[:5] == []
