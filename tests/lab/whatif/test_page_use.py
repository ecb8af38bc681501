"""What a reader does on the page: keyboard, bad input, links, and no JavaScript."""

import pytest

from tests.helpers.browser import needs_browser, unnamed_controls
from tests.helpers.what_if_page import (
    NUMBERS,
    choose_preset,
    link_of,
    open_all,
    set_number,
    settle,
    shown,
    state_of,
    wait_for,
)

pytestmark = needs_browser

OWN_STATE = {
    "model": "resnet50_imagenet",
    "backend": "nccl",
    "transport": "tcp-vm",
    "rate_gbit": 25,
    "step_ms": 348.5,
    "batch": 128,
    "batch_size": 128,
    "nodes": 8,
    "ranks_per_node": 8,
    "strategies": ["ddp", "ring"],
    "focus": "ddp",
}
COMMAND = "(state) => State.command(Page.data(), state)"
STEP_TEXTS = """(state) => state.strategies.map((name) => {
  const { step_seconds: seconds } = Engine.row(Page.data(), state, name);
  return Words.duration(seconds);
})"""


def copied_link(page):
    """Press the button and return the link's end."""
    page.locator("#copy-link").click()
    wait_for(page, "document.getElementById('copied').textContent.trim() !== ''")
    link = page.evaluate("navigator.clipboard.readText()")
    address, _, end = link.partition("#")
    assert address == page.url.partition("#")[0]
    return f"#{end}"


def sentences(text):
    return [part for part in text.replace(". ", ".\n").split("\n") if part.strip()]


def test_a_link_opens_the_same(browser, what_if):
    """It holds each control's value, and the command predicts the same."""
    with browser.page(what_if.path) as page:
        choose_preset(page, "laptops")
        before = shown(page)
        set_number(page, "nodes", 7)
        set_number(page, "rate_gbit", 2.5)
        page.locator("#c-scaling").select_option("strong")
        set_number(page, "batch_size", 300)
        here = shown(page)
        assert here != before
        link = copied_link(page)
        state = state_of(page, link)
    assert (state["nodes"], state["rate_gbit"], state["batch_size"]) == (7, 2.5, 300)
    with browser.page(what_if.path, fragment=link) as page:
        assert shown(page) == here
        assert copied_link(page) == link


@pytest.mark.slow
def test_cut_and_wrong_links(browser, what_if):
    """A sentence or two each, and the state before, at first the first preset."""
    with browser.page(what_if.path) as page:
        standard = shown(page)
        link = link_of(page, what_if.preset("gpus") | {"nodes": 32})
    nodes = "n=32"
    assert nodes in link
    wrong = [
        link[: len(link) // 3],
        link[: 2 * len(link) // 3],
        link[:-1],
        link.removesuffix("&end"),
        link.replace(nodes, "n=0"),
        link.replace(nodes, "n=eight"),
        link.replace(nodes, "n=1e99"),
        link.replace(nodes, "n=32&n=33"),
        link.replace(nodes, "q=32"),
        link.replace(nodes, "n=3.7"),
        link.replace(nodes, "n=-32"),
        link.replace(nodes, "n=32&y=ddp,ddp"),
        link.replace(nodes, "n=%E0%A4%A"),
        link.replace("m=resnet50_imagenet", "m=resnet51"),
        link.replace("t=rdma", "t=rdma&b=gloo"),
    ]
    assert link not in wrong
    with browser.page(what_if.path, fragment=wrong[0]) as page:
        assert shown(page) == standard
        assert page.locator("#message").is_visible()
        for cut in wrong[1:]:
            page.evaluate("document.getElementById('message').hidden = true")
            page.evaluate("(link) => { location.hash = link; }", cut)
            assert shown(page) == standard, cut
            message = page.locator("#message")
            assert message.is_visible(), cut
            assert 1 <= len(sentences(message.inner_text())) <= 2, cut


@pytest.mark.slow
def test_back_and_a_link_pasted_into_the_open_page(browser, what_if):
    with browser.page(what_if.path) as page:
        first = shown(page)
        page.evaluate("(link) => { location.hash = link; }", link_of(page, what_if.preset("gpus")))
        second = shown(page)
        assert second != first
        page.go_back()
        assert shown(page) == first
        page.go_forward()
        assert shown(page) == second
        for nodes in (9, 10, 11):
            set_number(page, "nodes", nodes)
        assert shown(page) != second
        page.go_back()
        assert shown(page) == second, "one step back for all changes of a control"


@pytest.mark.slow
def test_the_table_has_the_numbers_of_the_engine(browser, what_if):
    """And the command is of the state that is shown."""
    with browser.page(what_if.path) as page:
        states = [preset["state"] for preset in what_if.data["presets"]]
        states.append(states[0] | OWN_STATE)
        states.append(states[0] | {"nodes": 16, "scaling": "strong", "bucket_mb": 5})
        for state in states:
            page.evaluate("(link) => { location.hash = link; }", link_of(page, state))
            told = shown(page)
            assert told["command"] == page.evaluate(COMMAND, state)
            texts = page.evaluate(STEP_TEXTS, state)
            assert len(texts) == len(state["strategies"])
            for text in texts:
                assert text in told["tables"][1]


@pytest.mark.slow
def test_a_number_that_cannot_be(browser, what_if):
    """One sentence below its field; the answer and the pictures stay."""
    with browser.page(what_if.path) as page:
        choose_preset(page, "gpus")
        open_all(page)
        before = shown(page)
        fields = page.locator(NUMBERS).evaluate_all("(all) => all.map((field) => field.id)")
        assert {"c-nodes", "c-rate_gbit", "c-step_ms", "c-latency_us"} <= set(fields)
        tried = 0
        for field in fields:
            control = page.locator(f"#{field}")
            if not control.is_visible() or control.is_disabled():
                continue
            value = control.input_value()
            problem = page.locator(f"#problem-{field.removeprefix('c-')}")
            for bad in ("-3", "0", "1e30"):
                control.fill(bad)
                assert shown(page) == before, (field, bad)
                assert problem.is_visible(), (field, bad)
                assert not page.locator("#message").is_visible(), "said once"
                assert len(sentences(problem.inner_text())) == 1
                assert control.get_attribute("aria-invalid") == "true"
            control.fill(value)
            assert shown(page) == before
            assert not problem.is_visible()
            tried += 1
        assert tried >= 8


def focused(page):
    """Return what has the focus: an id or a tag with its label."""
    return page.evaluate("""() => {
      const element = document.activeElement;
      if (!element || element === document.body) return "";
      const label = element.getAttribute("aria-label") || element.textContent.trim().slice(0, 40);
      return element.id ? `#${element.id}` : `${element.tagName.toLowerCase()} ${label}`;
    }""")


def tab_through(page):
    """Press Tab until the focus leaves the page; return what had it, in order."""
    found = []
    while True:
        page.keyboard.press("Tab")
        now = focused(page)
        if not now or (found and now == found[0]):
            return found
        found.append(now)
        assert len(found) < 300


@pytest.mark.slow
def test_keyboard_alone(browser, what_if):
    """Tab reaches each control in the order of the page, and keys change it."""
    with browser.page(what_if.path) as page:
        choose_preset(page, "laptops")
        page.evaluate("document.activeElement.blur()")
        visible = page.evaluate("""() => {
          const all = document.querySelectorAll("input[id], select[id], button[id]");
          return [...all].filter((one) => one.checkVisibility() && !one.disabled).map((one) => `#${one.id}`);
        }""")  # noqa: E501 - JavaScript
        reached = tab_through(page)
        assert set(visible) <= set(reached)
        assert len([name for name in reached if name.startswith("summary")]) >= 4

        page.locator("#slide-nodes").focus()
        nodes = int(page.locator("#c-nodes").input_value())
        page.keyboard.press("ArrowRight")
        settle(page)
        assert int(page.locator("#c-nodes").input_value()) > nodes
        page.locator("#c-backend").focus()
        page.keyboard.press("ArrowUp")
        settle(page)
        assert "--backend nccl" in shown(page)["command"]
        page.locator("#s-ring").focus()
        page.keyboard.press("Space")
        assert "ring" in shown(page)["command"].split()

        assert page.locator("#table-steps").is_visible()
        page.locator("details[data-table=steps] summary").focus()
        for is_open in (False, True):
            page.keyboard.press("Enter")
            settle(page)
            assert page.locator("#table-steps").is_visible() == is_open


def look_near(page, box):
    """Return a picture of the part of the window around a box."""
    left, top = max(0, box["x"] - 8), max(0, box["y"] - 8)
    size = {"width": min(400, box["width"] + 16), "height": min(300, box["height"] + 16)}
    return page.screenshot(clip={"x": left, "y": top, **size})


@pytest.mark.slow
def test_the_focus_can_be_seen(browser, what_if):
    """The window scrolls to what has the focus, and something near it looks different."""
    unseen = []
    with browser.page(what_if.path) as page:
        choose_preset(page, "laptops")
        page.evaluate("document.activeElement.blur()")
        for _ in range(300):
            page.keyboard.press("Tab")
            name = focused(page)
            if not name:
                break
            box = page.evaluate("(window.last = document.activeElement).getBoundingClientRect()")
            if not 0 <= box["y"] < 900 or not 0 <= box["x"] < 1280:
                unseen.append(f"{name} is outside the window")
                continue
            with_focus = look_near(page, box)
            page.evaluate("window.last.blur()")
            if look_near(page, box) == with_focus:
                unseen.append(name)
            page.evaluate("window.last.focus({ preventScroll: true })")
        assert unseen == []


def test_screen_readers_names(browser, what_if):
    with browser.page(what_if.path) as page:
        open_all(page)
        assert unnamed_controls(page) == []
        assert page.locator("h1").count() == 1


@pytest.mark.slow
def test_without_javascript(browser, what_if):
    with browser.page(what_if.path, java_script_enabled=False) as page:
        assert not page.locator("#lab").is_visible()
        assert "lab predict" in page.locator("noscript").inner_text()


@pytest.mark.slow
def test_no_script_but_its_own(browser, what_if):
    """The policy stops what another program writes into the file, and requests."""
    text = what_if.text.replace("</body>", "<script>window.foreign = 1;</script></body>")
    copy = what_if.path.with_name("changed.html")
    copy.write_text(text, encoding="utf-8")
    with browser.page(copy, refused="Content Security Policy") as page:
        assert page.evaluate("window.foreign") is None
        assert shown(page)["sentence"]
    with browser.page(what_if.path, refused="Content Security Policy") as page:
        reply = page.evaluate("fetch('data:,x').then(() => 'sent', () => 'refused')")
        assert reply == "refused"
