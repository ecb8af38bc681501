"""The pictures of ``lab whatif`` in a browser: marks against numbers, keys, texts and files."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import lab.whatif
from common.say import duration_text
from lab.plot_style import SECTIONS
from tests.helpers.browser import (
    needs_browser,
    overlapping,
    pixels,
    seen_texts,
    sticking_out,
    text_contrasts,
)
from tests.helpers.picture_samples import cases, scaling, strategies, timeline

FOLDER = Path(lab.whatif.__file__).parent
PICTURES = ("timeline", "steps", "efficiency")
STYLE = """
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 "DejaVu Sans"; }
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f23; --muted: #57606a; --faint: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e6e9ed; --muted: #a3adb8; --faint: #2a3038; }
}
"""
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "%": 0.01}
CASES = cases()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A page with nothing but the pictures."""
    path = tmp_path_factory.mktemp("pictures") / "pictures.html"
    style = STYLE + (FOLDER / "pictures.css").read_text(encoding="utf-8")
    scripts = [(FOLDER / name).read_text(encoding="utf-8") for name in ("words.js", "pictures.js")]
    parts = ["<!DOCTYPE html><html lang='en'><meta charset='utf-8'><title>Pictures</title>"]
    parts.append(f"<style>{style}</style><body>")
    parts += [f"<svg id='{name}' class='picture'></svg>" for name in PICTURES]
    parts += [f"<script>{script}</script>" for script in scripts]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(browser, file):
    """The page, 800 pixels wide."""
    with browser.page(file, width=800) as opened:
        yield opened


def draw(page, name, model):
    """Draw one picture with these numbers."""
    script = """([name, data, model]) => {
      Pictures[name](document.getElementById(name), data, model);
    }"""
    page.evaluate(script, [name, {"strategies": strategies()}, model])


def draw_all(page, case):
    """Draw all pictures of a case."""
    draw(page, "timeline", case["timeline"])
    draw(page, "steps", case["curves"])
    draw(page, "efficiency", case["curves"])


def outlines(page, selector):
    """Return what these paths draw, one after the other, as the text of their attribute."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map(
          (path) => path.getAttribute("d")).join(" ")""",
        selector,
    )


def boxes(page, selector):
    """Return (left, right) of the bars, in the picture's pixels, in order."""
    pairs = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", outlines(page, selector))
    return [(float(left), float(left) + float(width)) for left, width in pairs]


def texts(page, selector):
    """Return the texts of these elements."""
    return page.locator(selector).all_text_contents()


def corners(page, selector):
    """Return the corners, as x and y, of all lines of these paths, one after the other."""
    pairs = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", outlines(page, selector))
    return [(float(x), float(y)) for x, y in pairs]


def centres(page, selector):
    """Return the middle of each of these marks, as x and y."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((mark) => {
          const box = mark.getBBox();
          const { a, d, e, f } = mark.transform.baseVal.consolidate().matrix;
          return [a * (box.x + box.width / 2) + e, d * (box.y + box.height / 2) + f];
        })""",
        selector,
    )


def amount(text):
    """Return the number of a tick, in seconds or as a share: "20 ms" is 0.02."""
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * (UNITS[unit] if unit else 1.0)


def fitted(places, amounts):
    """Return the scale that an axis' ticks state: from numbers to pixels."""
    slope, start = np.polyfit(amounts, places, 1)
    error = np.abs(np.polyval([slope, start], amounts) - places)
    assert error.max() < 0.05
    return lambda value: start + slope * value


def time_scale(page):
    """Return from seconds to pixels, as the timeline's axis states it."""
    places = [x for x, _ in corners(page, "#timeline .tick")]
    amounts = [amount(text) for text in texts(page, "#timeline .ticks")]
    return fitted(places, amounts)


def height_scale(page, name, *, log):
    """Return from a number to its height in pixels, as a chart's left axis states it."""
    heights = [y for _, y in corners(page, f"#{name} .gridline")]
    amounts = [amount(text) for text in texts(page, f"#{name} .heights")]
    assert len(amounts) >= 3
    if not log:
        return fitted(heights, amounts)
    scale = fitted(heights, np.log(amounts))
    return lambda value: scale(math.log(value))


def node_scale(page, name):
    """Return from a number of nodes to pixels."""
    places = [x for x, _ in corners(page, f"#{name} .tick")]
    amounts = [amount(text) for text in texts(page, f"#{name} .ticks")]
    scale = fitted(places, np.log(amounts))
    return lambda nodes: scale(math.log(nodes))


def near(found, expected):
    """Return whether pixels are within a tenth of those expected."""
    return np.shape(found) == np.shape(expected) and np.allclose(found, expected, atol=0.1)


def test_sections_have_the_colours_of_all_figures():
    text = (FOLDER / "pictures.js").read_text(encoding="utf-8")
    for name in ("forward", "backward", "update", "wait", "wire"):
        assert f'{name}: "{SECTIONS[name]}"' in text


@needs_browser
@pytest.mark.parametrize(
    "case",
    [
        "all strategies",
        pytest.param("hours", marks=pytest.mark.slow),
        pytest.param("microseconds", marks=pytest.mark.slow),
    ],
)
def test_timeline(page, case):
    """Bars, hatched parts and marks are where the axis says that their seconds are."""
    model = CASES[case]["timeline"]
    step = model["timeline"]
    draw(page, "timeline", model)
    scale = time_scale(page)

    def ends(spans):
        return [[scale(begin), scale(end)] for begin, end in spans]

    sent = step["messages"]
    assert near(
        boxes(page, ".message"), ends((message["begin"], message["end"]) for message in sent)
    )
    marks = [x for x, _ in corners(page, ".ready")]
    assert near(marks, [scale(message["ready"]) for message in sent])
    assert near(boxes(page, ".waits"), ends(step["exposed"]))
    hidden = (part for message in sent for part in message["exposed"])
    assert near(boxes(page, ".exposed"), ends(hidden))
    passes = ((part["begin"], part["end"]) for part in step["passes"])
    assert near(boxes(page, ".pass"), ends(passes))
    legend = " ".join(texts(page, "#timeline text"))
    for part in step["passes"]:
        assert f"{part['name']} {duration_text(part['end'] - part['begin'])}" in legend


@needs_browser
@pytest.mark.parametrize("case", ["four nodes", pytest.param("hours", marks=pytest.mark.slow)])
def test_steps(page, case):
    """Each point, band and mark of the curves is where the axes say that its numbers are."""
    model = CASES[case]["curves"]
    draw(page, "steps", model)
    x = node_scale(page, "steps")
    y = height_scale(page, "steps", log=True)

    def places(points, key):
        return [(x(point["nodes"]), y(point[key])) for point in points]

    curves = model["curves"]
    points = [point for curve in curves for point in curve["points"]]
    assert near(corners(page, "#steps .curve"), places(points, "step_seconds"))
    band = []
    for curve in curves:
        band += places(curve["points"], "high_seconds")
        band += places(reversed(curve["points"]), "low_seconds")
    assert near(corners(page, "#steps .band"), band)
    own = [point for point in points if point["nodes"] == model["nodes"]]
    assert near(centres(page, "#steps .reader"), places(own, "step_seconds"))
    assert {curve["strategy"] for curve in curves} <= set(texts(page, "#steps text"))


@needs_browser
def test_efficiency(page):
    model = CASES["400 messages"]["curves"]
    draw(page, "efficiency", model)
    x = node_scale(page, "efficiency")
    y = height_scale(page, "efficiency", log=False)
    points = [point for curve in model["curves"] for point in curve["points"]]
    expected = [(x(point["nodes"]), y(point["efficiency"])) for point in points]
    assert near(corners(page, "#efficiency .curve"), expected)
    expected = [(x(point["nodes"]), y(point["efficiency"])) for point in model["measured"]]
    # A triangle's middle is not that of its box.
    assert np.allclose(centres(page, "#efficiency .measured"), expected, atol=2)


@needs_browser
def test_the_pointer_is_told_numbers(page):
    """Of what it is on or near, inside the picture; keys and screen readers have the tables."""
    draw(page, "timeline", timeline(400, wire=1.5))
    draw(page, "steps", scaling(["ddp", "ring"], 4))
    assert page.locator("svg [tabindex]").count() == 0
    box = page.locator("#timeline .pass.backward").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert "backward 60 ms" in told(page, "timeline")
    below = page.locator("#timeline .message").bounding_box()
    page.mouse.move(below["x"] + below["width"] - 1, below["y"] + 5)
    assert "message 400 of 400" in told(page, "timeline")
    page.mouse.move(box["x"] + 5, box["y"] + 2000)
    assert told(page, "timeline") == ""
    ring = page.locator("#steps .reader").first.bounding_box()
    page.mouse.move(ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
    assert "ddp on 4 nodes 35 ms a step" in told(page, "steps")


def told(page, name):
    """Return what a picture tells beside a bar or a point."""
    text = " ".join(texts(page, f"#{name} .tip")).replace("\n", " ")
    if text:
        inside = page.evaluate(
            """(name) => {
              const picture = document.getElementById(name).getBoundingClientRect();
              const box = document.querySelector(`#${name} .tip`).getBoundingClientRect();
              return box.left >= picture.left && box.right <= picture.right
                && box.top >= picture.top - 1 && box.bottom <= picture.bottom + 1;
            }""",
            name,
        )
        assert inside
    return text


@needs_browser
def test_narrow(browser, file):
    """On a phone, texts stay apart and large; a wider window draws anew."""
    with browser.page(file, width=390) as page:
        draw_all(page, CASES["all strategies"])
        assert overlapping(page) == []
        assert sticking_out(page) == []
        assert min(text.size for text in seen_texts(page)) >= 10.99
        page.set_viewport_size({"width": 1000, "height": 900})
        page.wait_for_function(
            "document.getElementById('steps').getAttribute('viewBox').startsWith('0 0 1000 ')"
        )


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 760])
def test_no_text_covers_another(browser, file, width):
    with browser.page(file, width=width) as page:
        for name, case in CASES.items():
            draw_all(page, case)
            assert overlapping(page) == [], name
            assert sticking_out(page) == [], name
            assert min(text.size for text in seen_texts(page)) >= 10.99


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read(browser, file, dark):
    """Each text differs from what is behind it, on bars and stripes, too."""
    with browser.page(file, width=1000, dark=dark) as page:
        for name in ("four nodes", "hours"):
            draw_all(page, CASES[name])
            assert [text.text for ratio, text in text_contrasts(page) if ratio < 4.5] == []


@needs_browser
@pytest.mark.slow
def test_each_tip_is_inside(browser, file):
    """Also beside the outermost bars and points of a phone's pictures."""
    with browser.page(file, width=360) as page:
        for name in ("one node", "all strategies", "hours"):
            draw_all(page, CASES[name])
            outside, count = page.evaluate(OUTSIDE)
            assert outside == []
            assert count >= 9


OUTSIDE = """() => {
  const outside = [];
  let count = 0;
  for (const mark of document.querySelectorAll(".pass, .message, .waits, .marker, .measured")) {
    const picture = mark.ownerSVGElement;
    const { left, right, top, height } = mark.getBoundingClientRect();
    const clientY = top + height / 2;
    for (const clientX of [left, right]) {
      picture.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
      const tip = picture.querySelector(".tip div");
      if (tip === null) continue;
      const inner = tip.getBoundingClientRect();
      const outer = picture.getBoundingClientRect();
      const isInside = inner.left >= outer.left && inner.right <= outer.right
        && inner.top >= outer.top && inner.bottom <= outer.bottom;
      if (!isInside) outside.push(tip.textContent);
      count += 1;
    }
  }
  return [outside, count];
}"""


@needs_browser
@pytest.mark.slow
def test_saved_files(browser, file, tmp_path):
    """Files have the pictures' texts, and their colours in the scheme in which they were saved."""
    shown = {}
    with browser.page(file, width=700, dark=True) as page:
        draw_all(page, CASES["four nodes"])
        for name in PICTURES:
            page.locator(f"#{name} path").nth(3).dispatch_event("pointermove")
            with page.expect_download() as download:
                page.evaluate(f"Pictures.save(document.getElementById('{name}'), 'whatif')")
            assert download.value.suggested_filename == "whatif.svg"
            download.value.save_as(tmp_path / f"{name}.svg")
            shown[name] = texts(page, f"#{name} text")
        page.evaluate("scrollTo(0, 0)")
        here = pixels(page).astype(float)
    namespace = "{http://www.w3.org/2000/svg}"
    for name in PICTURES:
        text = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        root = ET.fromstring(text)
        assert [part.text for part in root.iter(f"{namespace}text")] == shown[name]
        assert root.find(f"{namespace}title").text
        assert "var(" not in text
    frame = tmp_path / "frame.html"
    images = "".join(f'<img src="{name}.svg" style="display: block">' for name in PICTURES)
    frame.write_text(f'<body style="margin: 0">{images}')
    with browser.page(frame, width=700) as page:  # in a light scheme
        alone = pixels(page).astype(float)
    assert alone.shape == here.shape
    assert np.mean(np.abs(alone - here) > 40) < 0.02  # letters may begin between two pixels
