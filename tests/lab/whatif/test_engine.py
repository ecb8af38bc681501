"""engine.js: the rows of `lab predict`, curves, timelines and terms. Skipped without node."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from common.sync import STRATEGIES
from lab.predict import event_model, priors, scenario
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.cluster import TypicalCluster
from lab.predict.tables import message_plans
from lab.whatif.data import page_data
from tests.helpers.node import needs_node
from tests.helpers.whatif_states import (
    Page,
    add_rows,
    differences,
    in_node,
    rows_in_node,
    shared_folder,
    shared_pages,
)

pytestmark = needs_node

QUICK = len(STRATEGIES) + 1  # of two pages
REFERENCE = load_calibration(reference_path())


@pytest.fixture(scope="module")
def quick_pages(tmp_path_factory, worker_id):
    """Return pages that together have a state for each strategy, and their rows."""
    return shared_pages(shared_folder(tmp_path_factory, worker_id), QUICK)


@pytest.fixture
def fresh_caches():
    """Forget what depends on constants, before a test changes them and afterwards."""

    def forget():
        event_model.stages_of.cache_clear()
        priors.load_priors.cache_clear()

    forget()
    yield forget
    forget()


def assert_equal(page, computed):
    found = differences(page, computed)
    assert not found, "\n".join(found[:5])


def test_rows_are_those_of_lab_predict(quick_pages):
    states = [state for page in quick_pages for state in page.states]
    assert {state["focus"] for state in states} == set(STRATEGIES)
    for page in quick_pages:
        assert {state["scaling"] for state in page.states} == {"strong", "weak"}
        assert {state["costs"] for state in page.states} == {"typical", "calibrated"}
        assert_equal(page, rows_in_node(page))


@pytest.mark.parametrize(
    "many",
    [
        pytest.param(200, marks=pytest.mark.slow),
        pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_rows_of_many_states_are_those_of_lab_predict(many, tmp_path_factory, worker_id):
    found = shared_pages(shared_folder(tmp_path_factory, worker_id), many, sampled_ranks=3)
    assert sum(len(page.rows) for page in found) == many
    for page in found:
        assert_equal(page, rows_in_node(page))


def test_the_model_of_the_calibration_comes_first(quick_pages):
    for page, model in zip(quick_pages, ("vgg11", "resnet18"), strict=True):
        assert page.data["models"][0]["name"] == model
        assert page.data["presets"][3]["state"]["model"] == model


def test_a_difference_is_found(quick_pages):
    page = quick_pages[0]
    computed = [dict(row) for row in page.rows]
    computed[3]["gains"] = computed[3]["gains"] | {"network": 1.0 + 1e-8}
    computed[5]["note"] = "another"
    names = [line.partition(":")[0] for line in differences(page, computed)]
    assert names == ["gains", "note"]


def preset_state(page, name, **changes):
    [preset] = [preset for preset in page.data["presets"] if preset["id"] == name]
    return preset["state"] | changes


def test_a_constant_or_prior_that_changed_in_python_is_noticed(
    quick_pages, monkeypatch, tmp_path, fresh_caches
):
    before = quick_pages[0]
    changed = priors.priors_path().read_text().replace("prior = [1.8, 3.0,", "prior = [1.8, 2.0,")
    path = tmp_path / "priors.toml"
    path.write_text(changed)
    monkeypatch.setattr(priors, "priors_path", lambda: path)
    monkeypatch.setattr(event_model, "PACKET_BYTES", 180)
    fresh_caches()
    data = json.loads(json.dumps(page_data(REFERENCE)))  # as in the page
    states = [preset_state(before, "cloudlab", focus=name) for name in ("gather_scatter", "ddp")]
    after = Page(data, before.calibration, states)
    add_rows(after)
    assert_equal(after, rows_in_node(after))
    for part in ("constants", "priors"):
        stale = replace(after, data=data | {part: before.data[part]})
        assert differences(stale, rows_in_node(stale))


def test_a_curve_has_the_rows_of_its_numbers_of_nodes(quick_pages):
    page = quick_pages[0]
    nodes = [1, 3, 16, 200]
    calls = []
    for name in ("gather_scatter", "sharded", "none"):
        state = preset_state(page, "cloudlab", scaling="weak", ranks_per_node=2)
        calls.append(["curve", state, name, nodes, {"band": True}])
        calls += [["row", state | {"nodes": count}, name] for count in nodes]
    answers = in_node(page.data, calls)
    for begin in range(0, len(answers), 5):
        curve, *rows = answers[begin : begin + 5]
        for point, row in zip(curve, rows, strict=True):
            low, high = row["speedup_range"]
            assert point == pytest.approx(
                {name: row[name] for name in point if name in row}
                | {
                    "low_efficiency": low / row["nodes"],
                    "high_efficiency": high / row["nodes"],
                },
                rel=1e-12,
            )


def test_a_timeline_adds_up_to_its_row(quick_pages):
    for page in quick_pages:
        calls = [[name, state, state["focus"]] for state in page.states for name in TIMED]
        answers = in_node(page.data, calls)
        for place, (state, row) in enumerate(zip(page.states, page.rows, strict=True)):
            timeline, terms = answers[2 * place : 2 * place + 2]
            check_timeline(timeline, terms, row, sends_every=4 if row["sync"] == "local_sgd" else 1)
            assert state["focus"] == row["sync"]


TIMED = ("timeline", "terms")


def check_timeline(timeline, terms, row, *, sends_every):
    """Assert that passes, messages and what is exposed make up the step."""
    near = {"rel": 1e-9, "abs": 1e-12 * row["step_seconds"]}
    forward, backward, update = timeline["passes"]
    exposed = sum(end - begin for begin, end in timeline["exposed"])
    assert timeline["mean_seconds"] == pytest.approx(row["step_seconds"], **near)
    assert exposed == pytest.approx(sends_every * row["sync_seconds"], **near)
    if sends_every == 1:
        assert timeline["total_seconds"] == pytest.approx(row["step_seconds"], **near)
    else:
        assert timeline["total_seconds"] >= row["step_seconds"]
        assert f"one of {sends_every} steps" in timeline["about"]
    assert forward["end"] == backward["begin"]
    assert update["end"] == timeline["total_seconds"]
    assert forward["begin"] + update["begin"] - backward["end"] == pytest.approx(exposed, **near)
    messages = timeline["messages"]
    for message, following in pairwise(messages):
        assert message["end"] <= following["begin"] + 1e-12 * row["step_seconds"]
    for message in messages:
        assert message["ready"] <= message["begin"] + 1e-12 * row["step_seconds"]
        assert message["ready"] <= backward["end"] + 1e-12 * row["step_seconds"]
        assert message["end"] <= update["begin"] + 1e-12 * row["step_seconds"]
    parts = [end - begin for message in messages for begin, end in message["exposed"]]
    assert math.fsum(parts) == pytest.approx(exposed, **near)
    lasting = math.fsum(message["end"] - message["begin"] for message in messages)
    assert lasting == pytest.approx(sum(terms.values()), **near)


def test_a_message_is_ready_once_backward_beside_the_others_has_made_it(quick_pages):
    page = quick_pages[0]
    state = preset_state(page, "laptops", costs="calibrated", step_ms=None, bucket_mb=4.0)
    [timeline] = in_node(page.data, [["timeline", state, "ddp"]])
    laptops = scenario.Scenario(
        calibration=REFERENCE, batch_size=256, scaling="strong", rate_bits=1e9, latency_seconds=2e-4
    )
    [plan] = message_plans(["ddp"], {"bucket_mb": 4.0}).values()
    operations = plan.operations(REFERENCE.gradient_sizes, 4)
    delays = [laptops.network.delay_share(operation, 4) for operation in operations]
    _, backward, _ = timeline["passes"]
    assert min(delays) > 0.02
    for operation, message in zip(operations, timeline["messages"], strict=True):
        moment = message["ready"]
        made = moment - backward["begin"]
        for other, delay in zip(timeline["messages"], delays, strict=True):
            beside = min(moment, other["end"]) - min(moment, other["begin"])
            made -= delay * beside
        expected = laptops.compute_at(4).ready_seconds(operation.ready_bytes)
        assert made == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("costs", ["typical", "calibrated"])
def test_terms_are_those_of_the_event_model(quick_pages, costs):
    page = quick_pages[0]
    state = preset_state(page, "laptops", costs=costs, ranks_per_node=2, step_ms=None)
    cluster = TypicalCluster.of("gloo", "tcp-vm") if costs == "typical" else None
    links = scenario.Scenario(
        calibration=REFERENCE,
        batch_size=256,
        scaling="strong",
        rate_bits=1e9,
        latency_seconds=None if cluster else 2e-4,
        ranks_per_node=2,
        cluster=cluster,
    )
    plans = message_plans(list(STRATEGIES), {"ranks_per_node": 2})
    answers = in_node(page.data, [["terms", state, name] for name in plans])
    for plan, terms in zip(plans.values(), answers, strict=True):
        expected = event_model.message_terms(
            plan, REFERENCE.gradient_sizes, 8, network=links.network
        )
        assert terms == pytest.approx(expected, rel=1e-9)
