"""The report's page in a real browser: on a phone, in dark mode, and printed."""

import re

import pytest

from lab.report import write_report
from tests.helpers.browser import (
    chromium,
    needs_browser,
    refuse_strangers,
    seen_texts,
    sticking_out,
)
from tests.helpers.report_samples import cell, results

pytestmark = needs_browser

DARK = ["rgb(20, 23, 28)", "rgb(230, 233, 237)"]  # paper and ink
LIGHT = ["rgb(255, 255, 255)", "rgb(27, 31, 35)"]
COLORS = """[getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector("svg text")).fill]"""
# Tables that are wider than their box, without a line above it that tells the reader to swipe.
HIDDEN_TABLES = """[...document.querySelectorAll(".scroll")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1).filter((box) => {
    const hint = box.previousElementSibling, own = hint.getBoundingClientRect();
    const frame = box.getBoundingClientRect();
    return !hint.matches(".swipe") || own.height < 8 || own.right > innerWidth
      || frame.top - own.bottom > 20 || frame.right > innerWidth
      || getComputedStyle(box).overflowX != "auto";
  }).length"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Write a report with long words."""
    data = results(
        ("gather_scatter", "halving_doubling", "ddp_powersgd"), (1, 2), accuracy=0.43, emulated=True
    )
    data.cells.append(
        cell("gather_scatter_flat", 2, status="failed", message="connection to " + "a" * 200)
    )
    data.settings["command"] = "lab compare --output-dir /" + "long/" * 60
    data.warnings = ["/" + "path" * 60]
    data.timelines = {"gather_scatter-n2": data.timelines["gather_scatter-n2"]}
    folder = tmp_path_factory.mktemp("browser")
    write_report(folder, data)
    return folder / "report.html"


@pytest.mark.parametrize(
    ("width", "dark", "smallest", "expected"), [(390, False, 8, LIGHT), (1280, True, 11, DARK)]
)
def test_phone_and_dark_wide_screen(browser, report, width, dark, smallest, expected):
    """No element sticks out, and text and figures have the colours of the mode."""
    with browser.page(report, width=width, dark=dark) as page:
        assert page.locator(".scroll").count() >= 5
        if width == 390:
            assert page.evaluate(HIDDEN_TABLES) == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert sticking_out(page) == []
        assert min(text.size for text in seen_texts(page)) >= smallest  # in pixels
        assert page.evaluate(COLORS) == expected


def test_the_page_runs_nothing_of_a_stranger(browser, report):
    refuse_strangers(browser, report)


@pytest.mark.slow
def test_print(browser, report):
    with browser.page(report, dark=True) as page:
        content = page.pdf()
    assert content.startswith(b"%PDF")
    pages = [int(count) for count in re.findall(rb"/Count (\d+)", content)]
    assert 3 <= max(pages) <= 12
