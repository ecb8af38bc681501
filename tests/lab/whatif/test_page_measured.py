"""Measured points in the page: each set, those that a page begins with, and where they leave."""

import pytest

from lab.cli import main
from tests.helpers import ROOT
from tests.helpers.browser import needs_browser
from tests.helpers.what_if_page import set_number, settle

pytestmark = [needs_browser, pytest.mark.slow]

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit"


def state_of(page):
    return page.evaluate("Page.state()")


def test_points_leave_with_their_settings(browser, what_if):
    with browser.page(what_if.path) as page:
        page.select_option("#measured-set", SHIPPED.name)
        settle(page)
        state = state_of(page)
        assert (state["nodes"], state["rate_gbit"], state["batch_size"]) == (4, 1, 256)
        assert page.locator("#steps .measured").count() == 4
        first = page.locator("#table-measured tbody tr").first.inner_text()
        assert "2.06 s" in first
        assert "%" in first
        set_number(page, "rate_gbit", 2)
        page.wait_for_selector("#measured-off:not([hidden])")
        assert "rate between nodes" in page.locator("#measured-off").inner_text()
        assert page.locator("#steps .measured").count() == 0
        assert page.locator("#table-measured").is_hidden()
        page.locator("#measured-off button").click()
        assert state_of(page) == state
        assert page.locator("#steps .measured").count() == 4
        set_number(page, "nodes", 16)
        assert page.locator("#measured-off").is_hidden()
        assert page.locator("#steps .measured").count() == 4, "they stand on their four nodes"


def test_each_set_that_comes_with_the_page_can_be_shown(browser, what_if):
    with browser.page(what_if.path) as page:
        choices = page.locator("#measured-set option").evaluate_all("all => all.map(o => o.value)")
        sets = [choice for choice in choices if choice]
        assert len(sets) > 30
        for name in sets:
            page.select_option("#measured-set", name)
            assert state_of(page)["measured"] == name, page.locator("#message").inner_text()
            assert page.locator("#measured-off").is_hidden(), name
            assert page.locator("#steps .measured").count() > 0, name


def test_the_readers_runs_are_what_the_page_begins_with(browser, tmp_path):
    path = tmp_path / "own.html"
    assert main(["whatif", "--out", str(path), "--runs", str(SHIPPED)]) == 0
    with browser.page(path) as page:
        assert state_of(page)["rate_gbit"] == 1
        assert page.locator("#steps .measured").count() == 4
    with browser.page(path, fragment="#n=7&end") as page:
        assert state_of(page)["nodes"] == 7
