"""The questions in the page: a guess, the answer, and the line for a course."""

import pytest

from tests.helpers.browser import needs_browser, overlapping, sticking_out, unnamed_controls
from tests.helpers.what_if_page import settle

pytestmark = needs_browser

HIDDEN = ("answer", "pictures", "measured", "controls", "share", "lab > nav")


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
