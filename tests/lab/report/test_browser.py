"""The report's page in a real browser: on a phone, in dark mode, and printed."""

import html
import json
import re
import shutil
import subprocess

import pytest

from lab.report import write_report
from tests.helpers.report_samples import cell, results

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium and no google-chrome on the path"
)

DARK_MODE = "--blink-settings=preferredColorScheme=0"
DARK = ["rgb(20, 23, 28)", "rgb(230, 233, 237)"]  # paper and ink
LIGHT = ["rgb(255, 255, 255)", "rgb(27, 31, 35)"]
# Sends its measurements to the enclosing page, which stores them in its <html> for --dump-dom. A
# frame can be as narrow as a phone; a window cannot.
MEASURE = """<script>
addEventListener("load", () => {
  const root = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter((element) => !element.closest(".scroll, pre, svg")
    && element.getBoundingClientRect().right > innerWidth + 0.5).map((element) => element.tagName);
  const small = [...document.querySelectorAll("svg text")].filter((text) => text.getBoundingClientRect().width)
    .map((text) => text.getBoundingClientRect().height);
  const cut = [...document.querySelectorAll("svg text")].filter((text) => {
    const own = text.getBoundingClientRect(), all = text.closest("svg").getBoundingClientRect();
    return own.width && (own.left < all.left - 1 || own.right > all.right + 1
      || own.top < all.top - 1 || own.bottom > all.bottom + 1);
  }).map((text) => text.textContent);
  const hidden = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1).filter((box) => {
    const hint = box.previousElementSibling, own = hint.getBoundingClientRect(), frame = box.getBoundingClientRect();
    return !hint.matches(".swipe") || own.height < 8 || own.right > innerWidth || frame.top - own.bottom > 20
      || frame.right > innerWidth || getComputedStyle(box).overflowX != "auto";
  }).length;
  const tables = document.querySelectorAll(".scroll").length;
  parent.postMessage(JSON.stringify([hidden, tables, innerWidth, root.scrollWidth, [...wide, ...cut], Math.min(...small),
    getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("svg text")).fill]), "*");
});
</script>"""  # noqa: E501 - JavaScript
AROUND = """<!DOCTYPE html><html><body style="margin: 0"><script>
addEventListener("message", (event) => { document.documentElement.dataset.measured = event.data; });
</script><iframe src="measured.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe></body></html>"""  # noqa: E501 - HTML


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Write a report with long words, and add a script to its page that measures the layout."""
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
    path = folder / "measured.html"
    text = (folder / "report.html").read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    return path


def browse(page, *flags):
    """Run the browser on ``page`` and return its output; fail if the console shows a message."""
    assert BROWSER
    flags += ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    flags += ("--enable-logging=stderr", "--virtual-time-budget=2000")
    flags += (f"--user-data-dir={page.parent / 'profile'}",)
    command = [BROWSER, *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def measured(page, width, *flags):
    """Return what MEASURE found, in a frame of this width.

    The tables that scroll without a visible hint, the number of tables, frame width, scroll width,
    overflowing elements, smallest text, background and ink.
    """
    around = page.with_name(f"around-{width}.html")
    around.write_text(AROUND.replace("WIDTH", str(width)), encoding="utf-8")
    found = re.search(
        r'data-measured="([^"]+)"', browse(around, "--dump-dom", "--window-size=1300,1000", *flags)
    )
    assert found
    return tuple(json.loads(html.unescape(found[1])))


@pytest.mark.parametrize(
    ("width", "smallest", "expected", "flags"),
    [(390, 8, LIGHT, ()), (1280, 9, DARK, (DARK_MODE,))],
)
def test_phone_and_dark_wide_screen(page, width, smallest, expected, flags):
    """No element sticks out, and text and figures have the colours of the mode."""
    hidden, tables, shown, scrolled, sticking_out, height, *colors = measured(page, width, *flags)
    assert tables >= 5
    if width == 390:
        assert hidden == 0
    assert shown == width >= scrolled
    assert sticking_out == []
    assert height >= smallest  # of the figures' text, in pixels
    assert colors == expected


@pytest.mark.slow
def test_print(page):
    paper = page.parent / "page.pdf"
    browse(page, f"--print-to-pdf={paper}", "--no-pdf-header-footer", DARK_MODE)
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    pages = [int(count) for count in re.findall(rb"/Count (\d+)", content)]
    assert 3 <= max(pages) <= 12
