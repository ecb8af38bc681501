"""Two states side by side, and the reader's targets: sentence, pictures and link."""

import pytest

from tests.helpers.browser import needs_browser, overlapping, sticking_out
from tests.helpers.what_if_page import choose_preset, set_number, settle, shown

pytestmark = [needs_browser, pytest.mark.slow]


def text(page, name):
    return page.locator(f"#{name}").inner_text().replace("\u00a0", " ")


def look(page):
    """Return what tells of both states."""
    drawn = [page.locator(f"#{name}").inner_html() for name in ("timeline", "steps", "efficiency")]
    return text(page, "comparison"), text(page, "targets"), drawn


@pytest.mark.parametrize("width", [390, 1280])
def test_a_kept_state_is_drawn_beside_the_next_and_in_the_link(browser, what_if, width):
    with browser.page(what_if.path, width=width) as page:
        choose_preset(page, "cloudlab")
        alone = shown(page)
        assert not page.locator("#comparison").is_visible()
        page.locator("#keep").click()
        assert "Change a control" in text(page, "comparison")
        set_number(page, "rate_gbit", 1)
        kept = what_if.preset("cloudlab")
        said = page.evaluate("(kept) => Words.comparison(Page.data(), kept, Page.state())", kept)
        assert text(page, "comparison") == said
        assert said.startswith("10 to 1 Gbit/s: ")
        assert page.locator("#steps .curve").count() == len(kept["strategies"]) + 1
        assert page.locator("#timeline .pass.backward").count() == 2
        longer, shorter = lengths(page, "#timeline .pass.backward")[::-1]
        assert longer > 1.05 * shorter, "both have one scale"
        assert overlapping(page) == []
        assert sticking_out(page) == []
        both = look(page)
        link = page.evaluate("State.encode(Page.data(), Page.state(), null)")
        page.locator("#copy-link").click()
        copied = page.evaluate("navigator.clipboard.readText()").partition("#")[2]
        assert f"#{copied}" != link
        page.go_back()
        settle(page)
        assert shown(page) == alone
        assert "Change a control" in text(page, "comparison")
        page.go_forward()
        settle(page)
        page.locator("#forget").click()
        assert not page.locator("#comparison").is_visible()
        assert page.locator("#timeline .pass.backward").count() == 1
    with browser.page(what_if.path, width=width, fragment=f"#{copied}") as page:
        settle(page)
        assert look(page) == both


def lengths(page, selector):
    return page.locator(selector).evaluate_all("all => all.map((bar) => bar.getBBox().width)")


def test_a_target_draws_its_line_and_names_the_nodes(browser, what_if):
    with browser.page(what_if.path) as page:
        choose_preset(page, "cloudlab")
        assert page.locator(".target").count() == 0
        set_number(page, "least_efficiency", 50)
        assert page.locator("#efficiency .target").count() == 1
        assert page.locator("#steps .target").count() == 0
        set_number(page, "most_step_ms", 400)
        assert page.locator("#steps .target").count() == 1
        assert text(page, "targets") == page.evaluate("Words.targets(Page.data(), Page.state())")
        line, half = page.evaluate("""() => {
          const line = document.querySelector("#efficiency .target").getBBox().y;
          const ticks = [...document.querySelectorAll("#efficiency .heights")];
          const heights = ["40 %", "60 %"].map((share) => {
            return ticks.find((tick) => tick.textContent === share).getBBox();
          });
          return [line, heights.reduce((sum, { y, height }) => sum + y + height / 2, 0) / 2];
        }""")
        assert line == pytest.approx(half, abs=2)
        here = look(page)
        link = page.evaluate("location.hash")
    assert "v=50" in link
    with browser.page(what_if.path, fragment=link) as page:
        assert look(page) == here


def test_curves_that_look_as_one_are_named_together(browser, what_if):
    """Without buckets of its own choice, ddp sends what all_reduce_flat sends."""
    with browser.page(what_if.path) as page:
        names = ["all_reduce", "all_reduce_flat", "ddp", "fsdp"]
        changes = {"strategies": names, "bucket_mb": 10000, "focus": "ddp"}
        state = what_if.preset("laptops") | changes
        page.evaluate("(state) => Page.show(state)", state)
        settle(page)
        legend = page.locator("#steps text").all_text_contents()
        assert {"all_reduce (per tensor)", "ddp = all_reduce_flat", "fsdp"} <= set(legend)
        page.evaluate("(state) => Page.show(state)", state | {"bucket_mb": 5})
        settle(page)
        assert "ddp" in page.locator("#steps text").all_text_contents()
