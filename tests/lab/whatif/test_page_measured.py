"""Files dropped onto the page, measured points in the pictures, and guesses, in a real browser."""

import json
import re
import shutil

import pytest

from lab.cli import main
from tests.helpers import ROOT
from tests.helpers.browser import needs_browser

pytestmark = [needs_browser, pytest.mark.slow]

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit" / "results.json"
DROP = """([name, text]) => {
  const dropped = new DataTransfer();
  dropped.items.add(new File([text], name));
  const event = { bubbles: true, cancelable: true, dataTransfer: dropped };
  document.getElementById("steps").dispatchEvent(new DragEvent("drop", event));
}"""
SECTIONS = ("controls", "answer", "pictures", "measured", "sources", "share")


def state_of(page):
    return page.evaluate("Page.state()")


def drop(page, name, text):
    """Drop a file onto a picture, and wait until the page says what it did with it."""
    page.evaluate("document.getElementById('measured-said').textContent = ''")
    page.evaluate(DROP, [name, text])
    said = "#measured-said:not(:empty), #measured-problem:not([hidden])"
    page.wait_for_selector(said, state="attached")


def visible(page):
    return [name for name in SECTIONS if page.locator(f"#{name}").is_visible()]


def test_a_dropped_comparison_is_shown_and_stays_in_the_page(browser, what_if):
    with browser.page(what_if.path) as page:
        drop(page, "results.json", SHIPPED.read_text())
        state = state_of(page)
        assert (state["nodes"], state["rate_gbit"], state["measured"]) == (4, 1, "results.json")
        assert page.locator("#steps .measured").count() == 4
        rows = page.locator("#table-measured tbody tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == [
            *("gather_scatter", "all_reduce", "overlapped", "ddp")
        ]
        assert "2.06 s" in rows[0]
        assert re.search(r"[+−]\d+ %", rows[0])
        assert "8.8 %" in page.locator("#measured-error").inner_text()
        assert "results" not in page.evaluate("location.hash"), "no other page has it"
        page.locator("#c-rate_gbit").fill("2")
        page.wait_for_selector("#measured-off:not([hidden])")
        assert "rate between nodes" in page.locator("#measured-off").inner_text()
        assert page.locator("#steps .measured").count() == 0
        page.locator("#measured-off button").click()
        assert state_of(page) == state
        assert page.locator("#steps .measured").count() == 4


def test_a_bad_file_changes_nothing(browser, what_if):
    with browser.page(what_if.path) as page:
        drop(page, "results.json", SHIPPED.read_text())
        before = page.evaluate("[Page.state(), location.hash, Page.data().measured.length]")
        newer = json.dumps(json.loads(SHIPPED.read_text()) | {"format": 2})
        pages = {"a.json": "{", "b.csv": "x,y\n1,2\n", "c.png": "\x89PNG", "d.json": newer}
        for name, text in pages.items():
            drop(page, name, text)
            problem = page.locator("#measured-problem").inner_text()
            assert name in problem
            assert problem.count(".") - problem.count(f"{name[1:]}") >= 1
            after = page.evaluate("[Page.state(), location.hash, Page.data().measured.length]")
            assert after == before, name
        drop(page, "again.json", SHIPPED.read_text())
        assert page.locator("#measured-problem").is_hidden()


def test_files_and_folders_can_be_chosen(browser, what_if, tmp_path):
    folder = tmp_path / "my comparison"
    (folder / "runs" / "x").mkdir(parents=True)
    shutil.copy(SHIPPED, folder)
    (folder / "table.csv").write_text("something,else\n")
    (folder / "runs" / "x" / "summary.json").write_text("{")
    table = tmp_path / "observed.csv"
    table.write_text("nodes,strategy,global_batch,step_seconds\n2,ddp,256,0.9\n4,ring,256,0.8\n")
    with browser.page(what_if.path) as page:
        page.set_input_files("#measured-folder", folder)
        page.wait_for_selector("#measured-said:not(:empty)", state="attached")
        assert state_of(page)["measured"] == "my-comparison"
        page.select_option("#measured-set", "")
        assert state_of(page)["measured"] is None
        own = state_of(page)
        page.evaluate("document.getElementById('measured-said').textContent = ''")
        page.set_input_files("#measured-files", [table, SHIPPED])
        page.wait_for_selector("#measured-said:not(:empty)", state="attached")
        assert "2 sets" in page.locator("#measured-said").inner_text()
        page.select_option("#measured-set", "observed.csv")
        state = state_of(page)
        assert (state["nodes"], state["strategies"]) == (4, ["ring", "ddp"])
        assert state["step_ms"] == own["step_ms"], "the table does not say it"


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


def test_a_question_shows_nothing_before_the_guess(browser, what_if):
    """By keyboard alone: the answer's pictures come after the number, and each can be left."""
    with browser.page(what_if.path) as page:
        before = state_of(page)
        page.locator("#question-start").focus()
        page.keyboard.press("Enter")
        assert visible(page) == []
        assert page.evaluate("document.activeElement.id") == "question-title"
        for typed in ("", "0", "-3", "many"):
            page.locator("#guess").fill(typed)
            page.keyboard.press("Enter")
            assert page.locator("#guess-problem").is_visible(), typed
            assert page.evaluate("document.activeElement.id") == "guess"
        assert visible(page) == []
        assert state_of(page) == before
        page.locator("#guess").fill("500")
        page.keyboard.press("Enter")
        assert visible(page) == list(SECTIONS)
        assert page.evaluate("document.activeElement.id") == "question-result"
        assert "You guessed 500 ms" in page.locator("#question-verdict").inner_text()
        assert "Lesson 2" in page.locator("#question-lesson").inner_text()
        page.locator("#question-next").press("Enter")
        assert visible(page) == []
        page.locator("#guess").fill("2")
        page.locator("#guess").press("Enter")
        verdict = page.locator("#question-verdict").inner_text()
        assert all(words in verdict for words in ("3.61", "80 %", "measured 3.8", "too low"))
        assert page.locator("#steps .measured").count() == 3
        page.locator("#copy-guesses").press("Enter")
        page.wait_for_selector("#question-score output:not(:empty)")
        line = page.evaluate("navigator.clipboard.readText()")
        assert re.fullmatch(
            r"lab whatif,\d{4}-\d\d-\d\d,1/2,batch,500,487\.9,root-link,2,3\.608", line
        )
        page.locator("#question-next").press("Enter")
        page.locator("#question-leave").press("Enter")
        assert visible(page) == list(SECTIONS)
        assert "question 3" in page.locator("#question-start").inner_text()
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]


def test_all_questions_to_the_end(browser, what_if):
    with browser.page(what_if.path, width=390) as page:
        page.locator("#question-start").click()
        for number in range(1, 13):
            assert page.locator("#question-title").inner_text() == f"Question {number} of 12"
            page.locator("#guess").fill("50" if number == 1 else "10")
            if number in (12,):
                page.locator("#guess").fill("700")
            page.locator("#guess").press("Enter")
            assert page.locator("#question-result").is_visible(), number
            assert page.locator("#message").is_hidden()
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, number
            if number < 12:
                page.locator("#question-next").click()
        assert page.locator("#question-next").is_hidden()
        page.locator("#question-leave").click()
        assert page.locator("#question-start").is_hidden()
        assert "of 12 guesses" in page.locator("#question-score").inner_text()
