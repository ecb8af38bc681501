"""The helper that measures pages finds what is planted, and nothing on a page without faults."""

import pytest

from tests.helpers.browser import (
    needs_browser,
    overlapping,
    seen_texts,
    sticking_out,
    text_contrasts,
    unnamed_controls,
)

pytestmark = [needs_browser, pytest.mark.slow]

FAULTLESS = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>t</title><body>
<style>:root { color-scheme: light dark } body { font: 16px/1.4 sans-serif; margin: 8px } .wide { overflow-x: auto; width: 300px }
.wide p { width: 900px } @media (prefers-color-scheme: dark) { body { color: #ddd; background: #111 } }
</style><h1>Title of this page</h1><p>A line of <b>bold</b> words, <a href="#x">linked</a> ones.
<label>Nodes <input type="range"></label> <label>Model <select><option>vgg11<option>bert</select></label>
<details><summary>Table</summary><p>hidden words</p></details><div class="wide"><p>far right</p></div>
<svg width="300" height="60" viewBox="0 0 300 60" role="img" aria-label="a step">
<rect width="300" height="60" fill="#202428"/><text x="10" y="30" fill="#eee">in a picture</text></svg>"""  # noqa: E501 - HTML
FAULTS = """<p style="position: absolute; top: 14px; left: 10px">covers the title</p>
<p style="color: #999; background: #fff">pale words</p><p style="width: 4000px">a wide paragraph</p>
<input type="number"><svg width="200" height="40" viewBox="0 0 400 80" role="img" aria-label="p">
<text x="390" y="40" font-size="14">cut off</text></svg>"""


def opened(browser, folder, text, **settings):
    path = folder / "a page.html"
    path.write_text(text, encoding="utf-8")
    return browser.page(path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_without_faults(browser, tmp_path, dark):
    with opened(browser, tmp_path, FAULTLESS, width=390, dark=dark) as page:
        assert overlapping(page) == []
        assert sticking_out(page) == []
        assert unnamed_controls(page) == []
        texts = {text.text: text for text in seen_texts(page)}
        assert "hidden words" not in texts
        assert texts["in a picture"].color == (238, 238, 238)
        assert texts["bold"].size == 16
        assert min(text_contrasts(page), key=lambda found: found[0])[0] > 7


def test_each_planted_fault(browser, tmp_path):
    with opened(browser, tmp_path, FAULTLESS + FAULTS) as page:
        assert overlapping(page) == ["'Title of this page' and 'covers the title'"]
        assert sticking_out(page) == ["p", "'cut off'"]
        assert [name.split(":")[0] for name in unnamed_controls(page)] == ["spinbutton"]
        assert {text.text: text.size for text in seen_texts(page)}["cut off"] == 7
        pale = [text.text for ratio, text in text_contrasts(page) if ratio < 4.5]
        assert pale == ["pale words"]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        pytest.param("console.error('wrong')", "wrong", marks=pytest.mark.slow),
        ("throw new Error('broken')", "script error: broken"),
        pytest.param("alert('stop')", "alert: stop", marks=pytest.mark.slow),
        ("fetch('http://127.0.0.1:9/x').catch(() => null)", "request: http://127.0.0.1:9/x"),
    ],
)
def test_a_problem_fails(browser, tmp_path, script, problem):
    text = f"{FAULTLESS}<script>{script}</script>"
    with (
        pytest.raises(AssertionError, match=problem),
        opened(browser, tmp_path, text) as page,
    ):
        page.wait_for_function("document.readyState === 'complete'")
