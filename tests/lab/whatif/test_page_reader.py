"""What readers missed: settings in words, their own settings back, and an answer in sight."""

import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from tests.helpers.browser import needs_browser
from tests.helpers.what_if_page import choose_preset, link_of, set_number, settle, wait_for

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def phone(browser, what_if):
    """The page on a narrow screen, where most controls are folded away."""
    with browser.page(what_if.path, width=390) as page:
        yield page


@pytest.fixture(scope="module")
def desk(browser, what_if):
    with browser.page(what_if.path, width=1280) as page:
        yield page


def show(page, state):
    """Show a state as a link does."""
    page.evaluate("(link) => { location.hash = link; }", link_of(page, state))
    settle(page)


def text(page, name):
    return page.locator(f"#{name}").inner_text().replace("\u00a0", " ")


def test_the_settings_in_words(phone):
    """Above the answer and on paper; backend and transport are never folded away."""
    choose_preset(phone, "gpus")
    for name in (
        "resnet50_imagenet",
        "8 nodes of 8 ranks",
        "NCCL over RDMA through the host's memory at 100 Gbit/s",
    ):
        assert name in text(phone, "settings")
    assert not phone.locator("#c-model").is_visible()
    phone.locator("#c-transport").select_option("tcp-vm")
    settle(phone)
    assert "NCCL over TCP" in text(phone, "settings")
    phone.emulate_media(media="print")
    assert phone.locator("#settings").is_visible()
    assert phone.locator("#command").is_visible()
    assert not phone.locator("#words").is_visible()
    phone.emulate_media(media="screen")


def test_a_saved_picture_says_what_it_is_of(desk, tmp_path):
    choose_preset(desk, "laptops")
    with desk.expect_download() as download:
        desk.locator("[data-save=steps]").click()
    download.value.save_as(tmp_path / "steps.svg")
    root = ET.parse(tmp_path / "steps.svg").getroot()
    texts = [part.text for part in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-1] == desk.evaluate("Words.about(Page.data(), Page.state())")
    assert "1 Gbit/s" in texts[-1]


def test_back_to_the_readers_settings(desk, what_if):
    """After a measured set and after the questions; there is nothing to go back to before."""
    choose_preset(desk, "laptops")
    back = desk.locator("#back")
    assert not back.is_visible()
    set_number(desk, "nodes", 7)
    set_number(desk, "latency_us", 123)
    mine = desk.evaluate("Page.state()")
    first, second = [entry["id"] for entry in what_if.data["measured"][:2]]

    def is_mine():
        return desk.evaluate("Page.state()") == mine and not back.is_visible()

    sets = desk.locator("#measured-set")
    sets.select_option(first)
    assert back.is_visible()
    set_number(desk, "nodes", 3)
    sets.select_option(second)
    back.click()
    assert is_mine()
    sets.select_option(first)
    sets.select_option("")
    assert is_mine()
    desk.locator("#question-start").click()
    desk.locator("#guess").fill(str(what_if.data["questions"][0]["range"][1]))
    desk.locator("#question-form [type=submit]").click()
    assert back.is_visible()
    desk.locator("#question-leave").click()
    assert is_mine()


def test_whose_step_time_it_is(desk):
    choose_preset(desk, "laptops")
    assert "is yours" in text(desk, "calibration")
    choose_preset(desk, "emulated")
    assert "yours" not in text(desk, "calibration")
    assert "calibrated on" in text(desk, "calibration")


def test_why_a_control_is_fixed(desk, what_if):
    """Under calibrated costs the model is the calibrated one."""
    choose_preset(desk, "emulated")
    field = desk.locator("#field-model")
    assert field.locator("select").is_disabled()
    assert what_if.data["calibration"]["model"] in field.locator("[data-fixed]").inner_text()
    choose_preset(desk, "laptops")
    assert field.locator("select").is_enabled()
    assert not field.locator("[data-fixed]").is_visible()


def test_words_and_the_batch(desk):
    choose_preset(desk, "cloudlab")
    desk.locator("#words summary").click()
    explained = " ".join(desk.locator("#words b").all_inner_texts())
    for word in ("rank", "node", "ddp", "gather_scatter", "all_reduce", "Gloo", "NCCL", "bucket"):
        assert word in explained
    assert len(desk.locator("#words li").all()) == 10
    assert text(desk, "help-batch_size") == "256 samples, 64 a node"
    assert len(desk.locator("#left-out li").all_text_contents()) >= 5
    assert "`" not in desk.locator("body").inner_text()


def test_a_link_of_a_file(desk):
    desk.locator("#copy-link").click()
    wait_for(desk, "document.getElementById('copied').textContent !== ''")
    assert "has this file" in text(desk, "copied")
    set_number(desk, "nodes", 9)
    assert text(desk, "copied") == "", "that link had other settings"


def test_a_network_twice_as_fast_is_explained_where_it_is_named(desk):
    choose_preset(desk, "laptops")
    assert desk.locator("#help-twice").is_visible()
    desk.locator("#c-focus").select_option("none")
    settle(desk)
    assert not desk.locator("#help-twice").is_visible()


def test_the_answer_stands_above_the_controls_on_a_phone(phone):
    answer, controls = (phone.locator(f"#{name}").bounding_box() for name in ("answer", "controls"))
    pictures = phone.locator("#pictures").bounding_box()
    assert answer["y"] + answer["height"] <= controls["y"] < pictures["y"]


def test_the_answer_stays_in_sight(phone):
    """On a narrow screen, while a slider moves; a screen reader has it once."""
    choose_preset(phone, "laptops")
    phone.locator("#c-rate_gbit").evaluate("(field) => field.scrollIntoView({ block: 'start' })")
    short = phone.locator("#short")
    box, field = short.bounding_box(), phone.locator("#c-rate_gbit").bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= field["y"], "it covers no control"
    before = text(phone, "short")
    seconds = phone.evaluate(
        "Words.duration(Engine.row(Page.data(), Page.state(), 'ddp').step_seconds)"
    )
    assert before.startswith(f"ddp: {seconds} (")
    phone.locator("#slide-rate_gbit").press("ArrowRight")
    settle(phone)
    assert text(phone, "short") != before
    assert short.get_attribute("aria-hidden") == "true"
    phone.locator("#question-start").click()
    assert not short.is_visible(), "it would tell the answer"
    phone.locator("#question-leave").click()


def test_the_answer_is_once_on_a_wide_screen(desk):
    assert not desk.locator("#short").is_visible()


def edges(page, box):
    """Return how dark the left and the right edge of a box are: 0 white, 255 black."""
    image = Image.open(io.BytesIO(box.screenshot(scale="css"))).convert("L")
    grey = 255 - np.asarray(image).astype(float)
    rows = grey[-12:-4]  # below the last line of text
    return np.median(rows[:, 1:3]), np.median(rows[:, -3:-1])


def test_a_table_shows_that_it_scrolls(phone, what_if):
    names = [strategy["name"] for strategy in what_if.data["strategies"]]
    show(phone, what_if.preset("laptops") | {"strategies": names})
    phone.locator("details[data-table=steps] summary").click()
    settle(phone)
    box = phone.locator("#figure-steps .scroll")
    assert box.evaluate("(box) => box.scrollWidth > 2 * box.clientWidth")
    left, right = edges(phone, box)
    assert left < 10 < right
    box.evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    left, right = edges(phone, box)
    assert right < 10 < left


def test_more_ranks_than_samples(phone, what_if):
    """The answer and the settings have the batch that is predicted."""
    show(phone, what_if.preset("cloudlab") | {"nodes": 4096})
    assert "global batch of 8,192" in text(phone, "sentence")
    assert "8,192 samples, 2 a node" in text(phone, "settings")
    assert "None of these steps is like yours" in text(phone, "error")


def test_numbers_that_are_not_shown(desk):
    """A refused number names the one that is shown; a comma is a decimal point."""
    choose_preset(desk, "cloudlab")
    set_number(desk, "nodes", 3.7)
    assert "shows 4" in text(desk, "problem-nodes")
    set_number(desk, "nodes", 4)
    rate = desk.locator("#c-rate_gbit")
    rate.fill("")
    rate.press_sequentially("1,5")
    settle(desk)
    assert desk.evaluate("Page.state().rate_gbit") == 1.5
    nodes = desk.locator("#c-nodes")
    nodes.fill("")
    nodes.press_sequentially("1,024")
    settle(desk)
    assert desk.evaluate("Page.state().nodes") == 1024


def test_a_strategy_that_sends_now_and_then(phone, what_if):
    """Its timeline has the mean step that the answer has."""
    show(phone, what_if.preset("cloudlab") | {"strategies": ["local_sgd"], "focus": "local_sgd"})
    row = phone.evaluate("Engine.row(Page.data(), Page.state(), 'local_sgd').step_seconds")
    mean = phone.evaluate("(seconds) => Words.duration(seconds)", row)
    drawn = phone.locator("#timeline").text_content()
    assert f"mean step takes {mean}" in drawn
    assert "one of 4 steps" in drawn
    assert mean in text(phone, "sentence").replace("\u00a0", " ")


def test_what_a_prediction_leaves_out_stands_in_the_answer(phone, what_if):
    """As the strategy's plan says it."""
    [caveat] = [
        entry["plan"]["caveat"] for entry in what_if.data["strategies"] if entry["name"] == "topk"
    ]
    show(phone, what_if.preset("cloudlab") | {"strategies": ["topk"], "focus": "topk"})
    assert caveat[1:] in text(phone, "sentence")
