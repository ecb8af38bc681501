"""Open pages in the system's Chromium, and measure what a reader sees there.

``chromium`` starts a browser, ``Chromium.page`` opens a file in it: a Page of playwright, whose
console errors, script errors, dialogs and requests to any host fail the test.
"""

import contextlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium and no google-chrome on the path"
)

_LIMIT_MS = 30_000.0  # of each wait
_LOCAL = ("file:", "data:", "blob:", "about:")
_MEASURES = Path(__file__).with_name("page_measures.js")
_HIDE_TEXT = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`text, tspan { fill: transparent !important }
    * { -webkit-text-fill-color: transparent !important; transition: none !important }`);
  document.adoptedStyleSheets = [sheet];
}"""


@contextlib.contextmanager
def chromium() -> Iterator["Chromium"]:
    """Start a headless browser; end it, and each process of it, at the end."""
    before = set(psutil.Process().children(recursive=True))
    started: set[psutil.Process] = set()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=BROWSER, chromium_sandbox=False, timeout=_LIMIT_MS
            )
            started = set(psutil.Process().children(recursive=True)) - before
            try:
                yield Chromium(browser)
            finally:
                browser.close()
    finally:
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Chromium:
    """A running browser. Each page has a profile of its own."""

    def __init__(self, browser: Browser):
        self._browser = browser

    @contextlib.contextmanager
    def page(
        self,
        path: Path,
        *,
        fragment: str = "",
        width: int = 1280,
        dark: bool = False,
        refused: str | None = None,
        **settings: Any,
    ) -> Iterator[Page]:
        """Open a file without a network, and raise AssertionError if the page had a problem.

        fragment : the link's part from "#" on.
        refused : words of the console errors that this test causes; there must be one.
        settings : of playwright's ``Browser.new_context``.
        """
        context = self._browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            offline=True,
            permissions=["clipboard-read", "clipboard-write"],
            **settings,
        )
        context.set_default_timeout(_LIMIT_MS)
        try:
            page = context.new_page()
            problems = _listen(page)
            try:
                page.add_init_script(path=_MEASURES)
                page.goto(path.as_uri() + fragment)
                yield page
            except BaseException as error:
                for problem in problems:
                    error.add_note(f"the page's {problem}")
                raise
            if refused is not None:
                expected = [problem for problem in problems if refused in problem]
                assert expected, f"no console error with {refused!r}: {problems}"
                problems = [problem for problem in problems if refused not in problem]
            assert not problems, "\n".join(problems)
        finally:
            context.close()


# Ways in which a stranger's text would run if a template did not escape it.
_INJECTED = """<script>window.ran = "script"</script>
<img src="data:,x" alt="" onerror="window.ran = 'handler'">
<svg onload="window.ran = 'svg'"></svg>
<iframe srcdoc="<script>parent.ran = 'frame'</script>"></iframe>
<a id="injected" href="javascript:window.ran = 'link'">link</a>
<form id="sends" action="http://127.0.0.1:9/" method="post"></form>
<script src="data:text/javascript,window.ran = 'source'"></script>
"""


def refuse_strangers(browser: Chromium, path: Path) -> None:
    """Assert that a browser runs nothing that is put into a page, and that it sends no form."""
    text = path.read_text(encoding="utf-8")
    assert text.count("<main") == 1
    hostile = path.with_name(f"injected-{path.name}")
    hostile.write_text(text.replace("<main", f"{_INJECTED}<main"), encoding="utf-8")
    with browser.page(hostile, refused="Content Security Policy") as page:
        page.locator("#injected").click()
        page.evaluate("document.getElementById('sends').submit()")
        page.wait_for_timeout(300)
        assert page.evaluate("window.ran") is None
        assert page.url == hostile.as_uri()


def _listen(page: Page) -> list[str]:
    """Return a list into which the page's problems go."""
    problems: list[str] = []

    def hear_console(message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            problems.append(f"console {message.type}: {message.text}")

    def hear_request(request: Any) -> None:
        if not request.url.startswith(_LOCAL):
            problems.append(f"request: {request.url}")

    def hear_dialog(dialog: Any) -> None:
        problems.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    page.on("console", hear_console)
    page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
    page.on("request", hear_request)
    page.on("websocket", lambda socket: problems.append(f"websocket: {socket.url}"))
    page.on("dialog", hear_dialog)
    return problems


@dataclass(frozen=True)
class SeenText:
    """A piece of visible text, and the box of one of its lines in the page, in pixels.

    size : its font's, as drawn. color : red, green, blue from 0 to 255.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    size: float
    color: tuple[float, float, float]
    bold: bool


def seen_texts(page: Page) -> list[SeenText]:
    """Return each line of each visible text, those of pictures and controls included."""
    found = page.evaluate("Measures.texts()")
    return [SeenText(**text | {"color": tuple(text["color"])}) for text in found]


def overlapping(page: Page) -> list[str]:
    """Return the pairs of texts and controls that cover each other, with the page at its top.

    Scrolled, what stays in sight covers what passes below it.
    """
    return page.evaluate("scrollTo(0, 0), Measures.overlaps()")


def sticking_out(page: Page) -> list[str]:
    """Return the elements and texts that end outside the page or their picture."""
    return page.evaluate("Measures.stickingOut()")


def pixels(page: Page) -> np.ndarray:
    """Return the whole page's pixels: shape (height, width, 3), 0 to 255."""
    image = Image.open(io.BytesIO(page.screenshot(full_page=True, scale="css")))
    return np.asarray(image.convert("RGB"))


def luminance(color: Any) -> Any:
    """Return the relative luminance of sRGB colours of shape (..., 3), as WCAG 2 defines it."""
    share = np.asarray(color, float) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(color: Any, other: Any) -> Any:
    """Return the contrast of two colours, from 1 to 21, as WCAG 2 defines it."""
    ours, theirs = luminance(color), luminance(other)
    return (np.maximum(ours, theirs) + 0.05) / (np.minimum(ours, theirs) + 0.05)


def text_contrasts(page: Page) -> list[tuple[float, SeenText]]:
    """Return each text's contrast with the pixels behind it.

    A tenth of the pixels may have less: a curve or a grid line behind the text.
    """
    texts = seen_texts(page)
    page.evaluate(_HIDE_TEXT)
    behind = pixels(page)
    page.evaluate("document.adoptedStyleSheets = []")
    found = []
    for text in texts:
        rows = slice(max(0, round(text.top)), round(text.bottom))
        columns = slice(max(0, round(text.left)), round(text.right))
        box = behind[rows, columns]
        if box.size:
            found.append((float(np.quantile(contrast(text.color, box), 0.1)), text))
    return found


def unnamed_controls(page: Page) -> list[str]:
    """Return the controls that a screen reader cannot name, from the accessibility tree."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    found = []
    for node in nodes:
        role = node.get("role", {}).get("value", "")
        name = node.get("name", {}).get("value", "")
        if not node["ignored"] and role in _CONTROL_ROLES and not name.strip():
            found.append(f"{role}: {node.get('properties', [])}")
    return found


_CONTROL_ROLES = {
    *("button", "checkbox", "combobox", "ComboBoxMenuList", "ComboBoxSelect", "DisclosureTriangle"),
    *("link", "listbox", "radio", "searchbox", "slider", "spinbutton", "switch", "tab", "textbox"),
    *("img", "image", "graphics-document"),
}
