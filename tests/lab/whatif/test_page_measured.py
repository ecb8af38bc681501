"""Measured points in the page: each set, those that a page begins with, and where they leave."""

import pytest

from lab.cli import main
from tests.helpers import ROOT
from tests.helpers.browser import needs_browser, overlapping, sticking_out
from tests.helpers.what_if_page import set_number, settle, shown
from tests.lab.predict.measured_runs import run_folder

pytestmark = [needs_browser, pytest.mark.slow]

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit"
TABLE = ROOT / "docs/examples/observed.csv"


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


def test_a_comparison_a_table_and_a_run_of_the_reader(browser, tmp_path):
    """Their points stand beside the curve, the state is theirs, and the error is told."""
    run = run_folder(tmp_path / "my runs" / "ring-n4", sync="ring", step_seconds=0.75)
    alone = run_folder(tmp_path / "my runs" / "alone", nodes=(0, 0, 0, 0))
    path = tmp_path / "own.html"
    files = [str(SHIPPED), str(TABLE), str(run)]
    assert main(["whatif", "--out", str(path), "--runs", *files]) == 0
    with browser.page(path) as page:
        assert ("gather_scatter", 4, "2.06 s") in points(page)
        told = shown(page)["command"]
        assert "--rate 1gbit" in told
        assert "--nodes 4" in told
        assert page.locator("#steps .measured").count() == 4
        assert page.locator("#measured-error").inner_text()
        assert page.locator("#measured-problem").is_hidden()
        assert overlapping(page) == []
        assert sticking_out(page) == []
        for name, expected in (
            ("ring-n4", ("ring", 4, "750 ms")),
            ("observed.csv", ("all_reduce", 4, "1.02 s")),
        ):
            page.select_option("#measured-set", name)
            settle(page)
            assert points(page) == [expected]
            link = page.evaluate("location.hash")
        assert "d=observed.csv" in link
    with browser.page(path, fragment=link) as page:
        assert points(page) == [("all_reduce", 4, "1.02 s")]
    assert main(["whatif", "--out", str(path), "--runs", str(alone)]) == 0
    with browser.page(path) as page:
        assert "alone has no step" in page.locator("#measured-problem").inner_text()
        assert state_of(page)["measured"] is None


def points(page):
    """Return (strategy, nodes, measured seconds) of the rows of the measured steps."""
    found = []
    for row in page.locator("#table-measured tbody tr").all():
        strategy, nodes, seconds, *_ = row.locator("th, td").all_inner_texts()
        found.append((strategy, int(nodes), seconds))
    return found


def test_a_point_outside_is_below_or_above_the_band(browser, what_if):
    """The digits agree: what is below the band is a smaller number than its lower end."""
    with browser.page(what_if.path) as page:
        choices = page.locator("#measured-set option").evaluate_all("all => all.map(o => o.value)")
        found = {"below": 0, "above": 0}
        for name in filter(None, choices):
            page.select_option("#measured-set", name)
            settle(page)
            rows = page.evaluate(
                """(id) => {
                  const data = Page.data();
                  const set = Measured.setCalled(data, id);
                  return Measured.compared(data, set, Page.state());
                }""",
                name,
            )
            texts = page.locator("#table-measured tbody tr").all_inner_texts()
            for row, text in zip(rows, texts, strict=True):
                side = row["side"]
                assert ("the band" in text) == (side != "inside"), name
                if side == "inside":
                    continue
                assert f"{side} the band" in text
                low = row["seconds"] < row["low_seconds"]
                assert low == (side == "below")
                found[side] += 1
            outside = [row["side"] for row in rows if row["side"] != "inside"]
            sentence = page.locator("#measured-sides").inner_text()
            assert bool(sentence) == (2 * max(map(outside.count, found)) > len(rows)), name
        assert min(found.values()) > 0
