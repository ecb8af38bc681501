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
from lab.predict.tables import message_plans, scaling_limits_of
from lab.whatif.data import page_data
from tests.helpers.node import needs_node
from tests.helpers.whatif_states import (
    Page,
    add_rows,
    command_of,
    differences,
    in_node,
    row_of,
    rows_in_node,
    scenario_of,
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


def test_the_ratio_of_two_states_is_of_the_same_draws(quick_pages):
    """It is the gain that lab predict states, whose interval shares the draws of both steps.

    With draws of its own for each step the interval would be twice as wide.
    """
    page = quick_pages[0]
    base = {"latency_us": 50.0, "scaling": "strong", "strategies": ["ddp"], "focus": "ddp"}
    found = []
    for name in ("cloudlab", "laptops", "gpus"):
        state = preset_state(page, name, **base, batch_size=4096, adapters=1)
        row = row_of(command_of(state, page.calibration))
        faster = state | {"rate_gbit": 2 * state["rate_gbit"]}
        more = state | {"nodes": 2 * state["nodes"]}
        calls = [["ratio", state, faster], ["ratio", state, more], ["ratio", state, state]]
        network, nodes, same = in_node(page.data, calls)
        assert network["value"] == pytest.approx(row["gains"]["network"], rel=1e-9)
        assert network["range"] == pytest.approx(row["gain_ranges"]["network"], rel=1e-9)
        assert nodes["range"] == pytest.approx(row["gain_ranges"]["nodes"], rel=1e-9)
        assert same == {"value": 1, "range": [1, 1]}
        independent = row["high_seconds"] / row["low_seconds"]
        found.append(independent > nodes["range"][1] / nodes["range"][0] * 1.05)
    assert all(found), "the steps alone are less certain than their ratio"


def test_costs_of_two_kinds_have_no_draws_in_common(quick_pages):
    page = quick_pages[0]
    typical = preset_state(page, "emulated", costs="typical")
    calibrated = preset_state(page, "emulated")
    [found] = in_node(page.data, [["ratio", typical, calibrated]])
    assert found["range"] is None
    assert found["value"] > 0


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_half_the_efficiency_is_where_lab_predict_has_it(quick_pages, scaling):
    page = quick_pages[0]
    wanted = []
    calls = []
    for batch_size, rate in ((256, 10.0), (1000, 1.0), (100, 2.5)):
        changes = {"batch_size": batch_size, "rate_gbit": rate, "scaling": scaling}
        state = preset_state(page, "cloudlab", **changes, strategies=["ddp"])
        predicted = scaling_limits_of(message_plans(["ddp"]), scenario_of(state, page.calibration))
        [limit] = [limit for limit in predicted if limit.scaling == scaling]
        wanted.append(limit.half_nodes)
        calls.append(["triedPoints", state])
    answers = in_node(page.data, calls)
    half = [max(p["nodes"] for p in points if p["efficiency"] >= 0.5) for points in answers]
    assert half == wanted
    assert len(set(half)) == 3


def test_a_slower_strategy_never_draws_the_higher_efficiency(quick_pages):
    """All refer to one base: on 2 nodes of 8 ranks all_reduce is slower than ddp."""
    page = quick_pages[0]
    names = ["gather_scatter", "all_reduce", "ddp", "fsdp"]
    state = preset_state(page, "gpus", nodes=2, strategies=names)
    curves = in_node(
        page.data, [["curve", state, name, [1, 2, 64], {"band": True}] for name in names]
    )
    for points in zip(*curves, strict=True):
        by_step = sorted(points, key=lambda point: point["step_seconds"])
        assert by_step == sorted(points, key=lambda point: -point["efficiency"])
        for point in points:
            assert point["low_efficiency"] <= point["high_efficiency"]
    alone = [points[0]["efficiency"] for points in curves]
    assert max(alone) == 1
    assert min(alone) < 0.99


def test_another_backend_sends_other_messages(quick_pages):
    """NCCL fetches weights ahead; what Gloo sent a moment before does not stay."""
    page = quick_pages[0]
    gloo = preset_state(page, "cloudlab", strategies=["fsdp"], focus="fsdp")
    nccl = gloo | {"backend": "nccl"}
    [_, after] = in_node(page.data, [["row", gloo, "fsdp"], ["row", nccl, "fsdp"]])
    [alone] = in_node(page.data, [["row", nccl, "fsdp"]])
    assert after == alone


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
