"""What follows from changes of the page's controls: history, other controls, and messages."""

import pytest

from lab.predict.cluster import generation_of
from tests.helpers.browser import needs_browser
from tests.helpers.what_if_page import choose_preset, set_number, settle

pytestmark = [needs_browser, pytest.mark.slow]

STATE = "Page.state()"


def state(page):
    return page.evaluate(STATE)


def test_back_undoes_all_changes_of_one_control(browser, what_if):
    """Dragging makes one entry of the history, and its last value is in the link."""
    with browser.page(what_if.path) as page:
        first = state(page)
        entries = page.evaluate("history.length")
        slider = page.locator("#slide-nodes")
        slider.focus()
        for _ in range(20):
            page.keyboard.press("ArrowRight")
        dragged = state(page)
        assert dragged["nodes"] > 50
        set_number(page, "rate_gbit", 25)
        assert page.evaluate("history.length") == entries + 2
        page.go_back()
        settle(page)
        assert state(page) == dragged
        page.go_back()
        settle(page)
        assert state(page) == first


def test_what_a_change_brings_along(browser, what_if):
    """The state can always be predicted: what contradicts a new value follows it."""
    with browser.page(what_if.path) as page:
        choose_preset(page, "gpus")
        page.locator("#c-backend").select_option("gloo")
        assert state(page)["transport"] == "tcp-server", "at 100 Gbit/s"
        page.locator("#c-costs").select_option("calibrated")
        found = state(page)
        assert (found["model"], found["step_ms"]) == (what_if.data["calibration"]["model"], None)
        assert page.locator("#c-backend").is_disabled()
        page.locator("#c-costs").select_option("typical")
        page.locator("#c-focus").select_option("ring")
        assert "ring" in state(page)["strategies"]
        page.locator("#s-ring").uncheck()
        found = state(page)
        assert "ring" not in found["strategies"]
        assert found["focus"] == found["strategies"][0]


def test_a_model_has_an_example_step_until_the_reader_types_his(browser, what_if):
    with browser.page(what_if.path) as page:
        examples = what_if.data["examples"]
        for preset in ("laptops", "gpus"):
            choose_preset(page, preset)
            before = state(page)
            for model in ("bert_base", "gpt2"):
                page.locator("#c-model").select_option(model)
                settle(page)
                found = state(page)
                example = examples[model]
                assert (found["step_ms"], found["batch"]) == (example["step_ms"], example["batch"])
                is_weak = before["scaling"] == "weak"
                kept = example["batch"] if is_weak else before["batch_size"]
                assert found["batch_size"] == kept
                assert "example step" in page.locator("#settings").inner_text()
                assert example["about"] in page.locator("#help-step_ms").inner_text()
            set_number(page, "step_ms", 77)
            assert "example" not in page.locator("#settings").inner_text()
            assert "example" not in page.locator("#help-step_ms").inner_text()
        page.locator("#c-model").select_option(what_if.data["calibration"]["model"])
        assert state(page)["step_ms"] is None
        assert "example" not in page.locator("#settings").inner_text()


def test_the_transport_follows_the_rate_until_the_reader_chooses_one(browser, what_if):
    """The likelier generation of nodes; lab predict takes the same one at these rates."""
    with browser.page(what_if.path) as page:

        def at(rate):
            set_number(page, "rate_gbit", rate)
            return state(page)["transport"]

        choose_preset(page, "laptops")
        for rate in (1, 10, 25, 100):
            assert at(rate) == generation_of("gloo", "tcp", 1e9 * rate)
        page.locator("#c-backend").select_option("nccl")
        for rate in (50, 100, 400):
            assert at(rate) == generation_of("nccl", "tcp", 1e9 * rate)
        choose_preset(page, "gpus")
        assert [at(100), at(400)] == ["rdma-host", "rdma-gpudirect"]
        page.locator("#c-transport").select_option("rdma-host")
        assert at(800) == "rdma-host"


def test_scaling_keeps_the_samples_of_a_step(browser, what_if):
    with browser.page(what_if.path) as page:
        choose_preset(page, "gpus")
        before = state(page)
        assert before["scaling"] == "weak"
        page.locator("#c-scaling").select_option("strong")
        ranks = before["nodes"] * before["ranks_per_node"]
        assert state(page)["batch_size"] == before["batch_size"] * ranks
        page.locator("#c-scaling").select_option("weak")
        assert state(page) == before


def test_the_last_strategy_stays(browser, what_if):
    with browser.page(what_if.path) as page:
        for name in state(page)["strategies"]:
            page.locator(f"#s-{name}").click()
        settle(page)
        [last] = state(page)["strategies"]
        assert page.locator(f"#s-{last}").is_checked()
        assert "one or more" in page.locator("#problem-strategies").inner_text()


def test_the_priors_that_hold_are_shown(browser, what_if):
    with browser.page(what_if.path) as page:
        choose_preset(page, "gpus")
        page.locator("details[data-table=priors] summary").click()
        settle(page)
        table = page.locator("#table-priors").inner_text()
        for prior in what_if.data["priors"]:
            holds = prior["name"].split(".")[0] in ("any", "nccl", "nccl-rdma", "nccl-rdma-host")
            assert (prior["source"] in table) == holds
