"""The reader's own measurements, dropped onto the page, and its questions."""

import json

import pytest

from tests.helpers.browser import needs_browser, overlapping, sticking_out, unnamed_controls
from tests.helpers.paths import ROOT
from tests.helpers.what_if_page import choose_preset, drop, settle, shown, wait_for

pytestmark = needs_browser

COMPARISON = ROOT / "reports/samples/compare-digits-1gbit/results.json"
TABLE = ROOT / "docs/examples/observed.csv"
HIDDEN = ("answer", "pictures", "measured", "controls", "share", "lab > nav")


def run_folder(folder):
    """Write what a run of four nodes leaves, as far as a reader of steps needs it."""
    folder.mkdir(parents=True)
    summary = {
        "sync": "ring",
        "model": "vgg11",
        "backend": "gloo",
        "global_batch_size": 256,
        "step_seconds": 0.75,
    }
    ranks = {"ranks": [{"rank": rank, "host": "h", "node": rank} for rank in range(4)]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "log.txt").write_text("something else\n" * 100)
    return folder


def chosen_set(page):
    """Wait for a set of measured steps and return its title."""
    wait_for(page, "document.getElementById('measured-set').value !== ''")
    return page.locator("#measured-set option:checked").inner_text()


def points(page):
    """Return (strategy, nodes, measured seconds) of the rows of the measured steps."""
    found = []
    for row in page.locator("#table-measured tbody tr").all():
        strategy, nodes, seconds, *_ = row.locator("th, td").all_inner_texts()
        found.append((strategy, int(nodes), seconds))
    return found


@pytest.mark.slow
def test_a_dropped_comparison_table_and_run(browser, what_if, tmp_path):
    """Its points stand beside the curve, the state is theirs, and the error is told."""
    run = run_folder(tmp_path / "my runs" / "ring-n4")
    with browser.page(what_if.path) as page:
        choose_preset(page, "gpus")
        drop(page, [COMPARISON])
        assert "1 Gbit/s" in chosen_set(page)
        assert ("gather_scatter", 4) in [(name, nodes) for name, nodes, _ in points(page)]
        told = shown(page)["command"]
        assert "--rate 1gbit" in told
        assert "--nodes 4" in told
        assert page.locator("#steps .measured").count() >= 4
        assert overlapping(page) == []
        assert sticking_out(page) == []
        assert page.locator("#measured-error").inner_text()

        page.locator("#measured-set").select_option("")
        drop(page, [run.parent])
        chosen_set(page)
        assert points(page) == [("ring", 4, "750 ms")]

        choose_preset(page, "laptops")
        drop(page, [TABLE])
        wait_for(page, "document.body.textContent.includes('observed.csv')")
        assert points(page) == [("all_reduce", 4, "1.02 s")]


@pytest.mark.slow
def test_dropped_files_that_are_something_else(browser, what_if, tmp_path):
    """One sentence that names the file, and everything stays."""

    def written(name, content):
        path = tmp_path / name
        path.write_text(content) if isinstance(content, str) else path.write_bytes(content)
        return path

    comparison = COMPARISON.read_text(encoding="utf-8")
    newer = json.loads(comparison) | {"format": 99}
    cells = json.loads(comparison)["cells"]
    odd_cell = cells[1] | {"sync": {"toString": 1}, "repeats": {}}
    odd = json.loads(comparison) | {"cells": [*cells, odd_cell, None, [1]]}
    header = TABLE.read_text(encoding="utf-8").splitlines()[0]
    empty = tmp_path / "empty folder"
    empty.mkdir()
    half = run_folder(tmp_path / "half a run")
    (half / "ranks.json").unlink()
    bad = [
        written("cut.json", comparison[:5000]),
        written("newer.json", json.dumps(newer)),
        written("else.json", '{"a": 1}'),
        written("list.json", "[1, 2]"),
        written("odd cells.json", json.dumps(odd)),
        written("nothing.json", ""),
        written("picture.png", b"\x89PNG\r\n\x1a\n\x00\xff"),
        written("no columns.csv", "a,b\n1,2\n"),
        written("no rows.csv", header + "\n"),
        written("a word.csv", header + "\n4,ring,256,soon\n"),
        written("unknown.csv", header + "\n4,best_ever,256,0.5\n"),
        written("decimal comma.csv", header + "\n4,ring,256,0,5\n"),
        written("far too long.csv", header + "\n" + "4,ring,256,0.5\n" * 100_000),
        empty,
        half,
    ]
    with browser.page(what_if.path) as page:
        before = shown(page)
        problem = page.locator("#measured-problem")
        for path in bad:
            page.evaluate("document.getElementById('measured-problem').hidden = true")
            drop(page, [path])
            problem.wait_for(state="visible")
            text = problem.inner_text()
            assert path.name in text or path.is_dir(), text
            assert text.count("\n") == 0
            assert shown(page) == before, path
        drop(page, [COMPARISON])
        chosen_set(page)
        assert not problem.is_visible(), "each drop begins anew"


@pytest.mark.slow
def test_files_are_chosen_by_keyboard(browser, what_if, tmp_path):
    """Who cannot drop presses a button and chooses files, or a folder."""
    runs = run_folder(tmp_path / "runs" / "ring-n4").parent
    with browser.page(what_if.path) as page:
        page.on("filechooser", lambda chooser: None)  # from now on none opens a window
        settle(page)
        for kind, chosen, title in (("files", COMPARISON, "1 Gbit/s"), ("folder", runs, "ring-n4")):
            page.locator(f"[data-pick={kind}]").focus()
            with page.expect_file_chooser() as chooser:
                page.keyboard.press("Enter")
            chooser.value.set_files(chosen)
            selected = "document.querySelector('#measured-set option:checked').textContent"
            wait_for(page, f"{selected}.includes('{title}')")


def ask_first(page):
    page.locator("#question-start").click()
    settle(page)


def test_a_question_before_and_after_the_guess(browser, what_if):
    """Nothing tells the answer before the guess; then answer, error and pictures."""
    with browser.page(what_if.path, width=390) as page:
        ask_first(page)
        for part in HIDDEN:
            assert not page.locator(f"#{part}").is_visible(), part
        assert page.locator("#question-text").inner_text()
        assert unnamed_controls(page) == []
        assert overlapping(page) == []
        page.keyboard.press("Tab")
        page.keyboard.type("much")
        page.keyboard.press("Enter")
        assert page.locator("#guess-problem").is_visible()
        assert not page.locator("#pictures").is_visible()
        page.locator("#guess").fill("600")
        page.keyboard.press("Enter")
        settle(page)
        question = what_if.data["questions"][0]
        answer = page.evaluate("(question) => Questions.answer(Page.data(), question)", question)
        verdict = page.locator("#question-verdict").inner_text()
        assert page.evaluate("(value) => Words.three(value)", answer["value"]) in verdict
        assert "600" in verdict
        assert page.locator("#pictures").is_visible()
        assert overlapping(page) == []
        assert sticking_out(page) == []


@pytest.mark.slow
def test_all_questions_by_keyboard(browser, what_if):
    """Each has an answer, and the line for the course's form has all guesses."""
    questions = what_if.data["questions"]
    with browser.page(what_if.path) as page:
        page.locator("#question-start").focus()
        page.keyboard.press("Enter")
        for number, question in enumerate(questions, 1):
            page.keyboard.press("Tab")
            page.keyboard.type(str(question["range"][0]))
            page.keyboard.press("Enter")
            settle(page)
            assert page.locator("#question-verdict").inner_text(), question["id"]
            assert "{" not in page.locator("#question-why").inner_text()
            if number < len(questions):
                page.locator("#question-next").focus()
                page.keyboard.press("Enter")
        page.locator("#copy-guesses").click()
        line = page.evaluate("navigator.clipboard.readText()")
    for question in questions:
        assert question["id"] in line
    assert len(questions) == 12
    assert f"/{len(questions)}" in line
