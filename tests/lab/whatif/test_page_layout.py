"""The page's looks, at each preset, on a phone and on a wide screen, light and dark, on paper."""

import itertools
import re

import pytest

from tests.helpers.browser import (
    contrast,
    luminance,
    needs_browser,
    overlapping,
    seen_texts,
    sticking_out,
    text_contrasts,
)
from tests.helpers.what_if_page import choose_preset, open_all, settle

pytestmark = needs_browser

PICTURES = ("timeline", "steps", "efficiency")


def presets(what_if):
    return [preset["id"] for preset in what_if.data["presets"]]


def is_too_wide(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_phone(browser, what_if):
    """Nothing covers anything or sticks out, and the smallest text has 11 pixels."""
    with browser.page(what_if.path, width=390) as page:
        open_all(page)
        for preset in ("laptops", "gpus"):
            choose_preset(page, preset)
            assert overlapping(page) == []
            assert sticking_out(page) == []
            assert not is_too_wide(page)
            assert min(text.size for text in seen_texts(page)) >= 10.99


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_each_preset(browser, what_if, width, dark):
    """Texts can be read on what is behind them, too, and pictures fill the width."""
    faults = []
    with browser.page(what_if.path, width=width, dark=dark) as page:
        open_all(page)
        for preset in presets(what_if):
            choose_preset(page, preset)
            faults += overlapping(page) + sticking_out(page)
            faults += ["too wide"] if is_too_wide(page) else []
            faults += [f"small: {text.text}" for text in seen_texts(page) if text.size < 10.99]
            pale = [(ratio, text.text) for ratio, text in text_contrasts(page) if ratio < 4.5]
            faults += [f"pale: {text}: {ratio:.1f}" for ratio, text in pale]
            for picture in PICTURES:
                box = page.locator(f"#{picture}").bounding_box()
                assert box is not None
                assert box["width"] > 0.3 * width, picture
            assert faults == [], preset


@pytest.mark.slow
def test_print(browser, what_if):
    """On paper: all pictures and the answer, no controls, black on white in dark mode, too."""
    with browser.page(what_if.path, dark=True) as page:
        choose_preset(page, "laptops")
        page.emulate_media(media="print")
        settle(page)
        for picture in PICTURES:
            assert page.locator(f"#{picture}").is_visible()
        assert page.locator("#sentence").is_visible()
        assert not page.locator("#controls").is_visible()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
        assert [ratio for ratio, _ in text_contrasts(page) if ratio < 4.5] == []
        content = page.pdf()
    assert content.startswith(b"%PDF")
    pages = max(int(count) for count in re.findall(rb"/Count (\d+)", content))
    assert 1 <= pages <= 6


@pytest.mark.slow
def test_reduced_motion(browser, what_if):
    """Nothing moves for a reader who asked for that."""
    with browser.page(what_if.path, reduced_motion="reduce") as page:
        choose_preset(page, "gpus")
        assert page.evaluate("document.getAnimations().length") == 0
        moving = page.evaluate("""[...document.querySelectorAll("*")].filter((element) => {
          const style = getComputedStyle(element);
          return parseFloat(style.transitionDuration) > 0.01 || parseFloat(style.animationDuration) > 0.01
            || style.scrollBehavior === "smooth";
        }).length""")  # noqa: E501 - JavaScript
        assert moving == 0


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_strategies_in_grey(browser, what_if, dark):
    """Without colours, lightness, dashes or markers tell two strategies apart."""
    looks = {}
    with browser.page(what_if.path, dark=dark) as page:
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for strategy in what_if.data["strategies"]:
            name = strategy["name"]
            state = what_if.preset("laptops") | {"strategies": [name], "focus": name}
            page.evaluate("(state) => Page.show(state)", state)
            curve = page.locator("#steps .curve")
            color, dash = curve.evaluate(
                "(path) => [path.getAttribute('stroke'), path.getAttribute('stroke-dasharray')]"
            )
            marker = page.locator("#steps .marker").first.get_attribute("d")
            looks[name] = (rgb(color), dash, strategy["marker"])
            assert marker
            assert contrast(rgb(color), rgb(paper)) >= 3, name
    for (name, look), (other, its) in itertools.combinations(looks.items(), 2):
        light = [116 * luminance(color) ** (1 / 3) for color in (look[0], its[0])]
        assert abs(light[0] - light[1]) > 10 or look[1:] != its[1:], (name, other)


def rgb(color):
    """Return red, green and blue of "#1b1f23" or "rgb(27, 31, 35)"."""
    if color.startswith("#"):
        return tuple(bytes.fromhex(color[1:]))
    return tuple(int(part) for part in re.findall(r"\d+", color)[:3])
