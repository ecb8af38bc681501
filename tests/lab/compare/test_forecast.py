"""Predictions for emulated nodes: measured messages, the profile's times, and the event model."""

import json
from html import unescape

import pytest

from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.models import build_model
from common.sync.message_cost import GradientSize, Operation
from common.sync.plans.batchnorm import BatchNormLayer
from lab.calibrate.link_measurements import LARGE, LARGEST, SMALL, measure_links
from lab.cluster.tools import namespaces_refused
from lab.compare.cells import plan_cells
from lab.compare.prediction import (
    _batchnorm_plan,
    compute_on_nodes,
    emulated_compute,
    forecast,
    kinds_of,
)
from lab.compare.settings import Settings
from lab.comparison.record import read_comparison
from lab.predict.event_model import HEADERS, Network, Rate, loads, operation_terms
from lab.predict.measured_links import (
    MeasuredLinks,
    ProbedLinks,
    network_from,
    shared_links_from,
)
from tests.helpers import run_ranks, start_lab

MADE = "2026-11-23T12:00:00"
FOUR = [GradientSize((size,)) for size in (100, 200, 300, 400)]


def slow_step(nodes=4):
    """Return the step of four layers whose backward takes 1, 2, 3 and 4 s.

    Backward runs the last layer first. The third layer has no parameters.
    """
    layers = tuple(
        Layer(str(place), SectionTime(0.1, 0.01), SectionTime(place + 1.0, 0.0), own)
        for place, own in enumerate((("a",), ("b",), (), ("c", "d")))
    )
    profile = Profile("slow", "m", "cpu", 1, MADE, "vgg11", (32, 32), layers, 0.5)
    return emulated_compute(profile, 10, dict(zip("abcd", FOUR, strict=True)))


def test_gradients_are_ready_when_their_layers_backward_has_ended():
    step = slow_step()
    assert step.before_seconds == pytest.approx(4 * 0.2)
    assert (step.backward_seconds, step.update_seconds) == (10.0, 0.5)
    ready = [step.ready_seconds(nbytes) for nbytes in (1, 1_600, 1_601, 2_800, 2_801, 3_600, 4_000)]
    assert ready == pytest.approx([4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 10.0])


@pytest.mark.parametrize("known", [2e8, None])
def test_the_network_is_that_of_the_links(known):
    """The measured messages follow the event model on links of 200 Mbit/s."""

    def seconds(kind, nbytes):
        return max(0.007, loads(kind, nbytes, 4)[1] * 8 * HEADERS / 2e8 + 0.003)

    kinds, sizes = ("all_reduce", "gather"), (SMALL, LARGE, LARGEST)
    rows = {kind: [[nbytes, seconds(kind, nbytes)] for nbytes in sizes] for kind in kinds}
    network = network_from(MeasuredLinks(4, rows, sum=1e-10, copy=2e-10), rate_bits=known)
    for kind in kinds:
        rate = network.rate(kind)
        assert rate.beta_seconds_per_byte == pytest.approx(8 * HEADERS / 2e8)
        assert rate.alpha_seconds * loads(kind, 1, 4)[0] == pytest.approx(0.003)
        assert rate.floor_seconds == 0.007
    assert (network.gamma_seconds_per_byte, network.copy_seconds_per_byte) == (1e-10, 2e-10)


def test_steps_of_emulated_cells_are_those_of_the_event_model():
    """Predicted steps follow the event model.

    all_reduce sends its messages one after another, after backward. overlapped sends a bucket once
    it is ready and the bucket before it has been sent.
    """
    syncs = ("all_reduce", "overlapped", "topk")
    cells = plan_cells(Settings(nodes=(1, 4), sync=syncs, rates=("200mbit",), compute="slow"))
    networks = {(4, "200mbit"): Network(0.0, 1e-2, kinds={"all_reduce": Rate(0.0, 1e-2, 10.0)})}
    made = forecast(cells, networks, slow_step, FOUR, {"bucket_mb": 1_500 / 2**20})
    seconds = {name: cell.step_seconds for name, cell in made.items()}
    assert seconds["none-n1"] == pytest.approx(0.8 + 10.0 + 0.5)
    each = [max(10.0, 1.5 * size * 1e-2) for size in FOUR]
    assert seconds["all_reduce-n4-200mbit"] == pytest.approx(0.8 + 10.0 + sum(each) + 0.5)
    # parameters d; c and b; a
    buckets = [max(10.0, 1.5 * size * 1e-2) for size in (1_600, 2_000, 400)]
    ends = 4.0 + buckets[0]
    for ready, bucket in zip((9.0, 10.0), buckets[1:], strict=True):
        ends = max(ready, ends) + bucket
    assert seconds["overlapped-n4-200mbit"] == pytest.approx(0.8 + ends + 0.5)
    assert len(made["all_reduce-n4-200mbit"].bytes_sent) == 4
    out_of_scope = {name: cell.why for name, cell in made.items() if not cell.in_scope}
    assert out_of_scope == {"topk-n4-200mbit": "lossy or periodic"}
    other = forecast(cells, networks, slow_step, FOUR, {}, other_model="vgg13", no_network=True)
    assert other["none-n1"].why == "calibrated with vgg13"
    assert other["overlapped-n4-200mbit"].why == "calibrated over loopback, no network"


def test_what_compression_computes_is_in_the_forecast():
    """40 MB on links that take no time: only the search for the largest entries is left."""
    syncs = ("all_reduce_flat", "topk")
    cells = plan_cells(Settings(nodes=(4,), sync=syncs, rates=("200mbit",), compute="slow"))
    networks = {(4, "200mbit"): Network(0.0, 1e-15)}
    made = forecast(cells, networks, slow_step, [40_000_000], {})
    assert made["all_reduce_flat-n4-200mbit"].sync_seconds < 0.001
    assert 0.03 < made["topk-n4-200mbit"].sync_seconds < 0.15


def test_ranks_that_share_a_link_have_a_network_for_all_and_one_for_groups():
    """hierarchical takes the grouped network and crosses the links with less."""
    syncs = ("all_reduce_flat", "hierarchical")
    asked = Settings(nodes=(1, 4), sync=syncs, rates=("200mbit",), compute="slow", ranks_per_node=2)
    cells = plan_cells(asked)
    assert [(cell.id, cell.ranks) for cell in cells] == [
        ("none-n1", 1),
        ("all_reduce_flat-n4x2-200mbit", 8),
        ("hierarchical-n4x2-200mbit", 8),
    ]
    place = (4, "200mbit")
    inside = Network(0.0, 1e-4)
    between = Network(0.0, 1e-3).over(
        rate_bits=None, latency_seconds=None, ranks_per_node=2, inside=inside
    )
    options = asked.strategy_options
    made = forecast(
        cells, {place: Network(0.0, 1e-2)}, slow_step, FOUR, options, grouped={place: between}
    )
    own = 0.8 + 10.0 + 0.5
    whole = 4_000  # bytes of all gradients
    flat = made["all_reduce_flat-n4x2-200mbit"]
    assert flat.step_seconds == pytest.approx(own + 2 * 7 / 8 * whole * 1e-2)
    assert flat.link_bytes == [(pytest.approx(2 * 7 / 8 * whole),) * 2] * 4
    grouped = made["hierarchical-n4x2-200mbit"]
    within = 2 * whole * 1e-4  # a reduce and a broadcast
    assert grouped.step_seconds == pytest.approx(own + within + 2 * 3 / 4 * whole * 1e-3)
    assert grouped.link_bytes == [(pytest.approx(2 * 3 / 4 * whole),) * 2] * 4
    assert made["none-n1"].link_bytes == []


@pytest.mark.parametrize("kind", ["all_reduce", "gather", "exchange"])
def test_what_is_measured_among_all_ranks_is_predicted_again_where_they_share_links(kind):
    """A message of the measured size takes what it took, whoever shares the links."""
    slow = 8 * HEADERS / 2e8
    on_link = {"all_reduce": 2 * 7 / 8, "gather": 6, "exchange": 1}[kind]
    seconds = on_link * LARGE * slow + 0.02
    found = ProbedLinks(
        all=MeasuredLinks(8, {kind: [(SMALL, 0.001), (LARGE, seconds)]}, sum=0.0, copy=0.0),
        node=MeasuredLinks(
            2,
            {"reduce": [(SMALL, 0.001), (LARGE, 0.002), (LARGEST, 0.008)]},
            sum=0.0,
            copy=0.0,
        ),
    )
    links = shared_links_from(found, rate_bits=2e8, ranks_per_node=2)
    terms = operation_terms(Operation(kind, LARGE), 8, links.flat)
    assert sum(terms.values()) == pytest.approx(seconds, rel=0.01)
    inside = sum(
        operation_terms(Operation("reduce", LARGEST, among="node"), 8, links.flat).values()
    )
    assert inside == pytest.approx(0.008, rel=0.01)
    assert links.grouped is None


def test_synchronised_batchnorm_is_measured_predicted_and_counted(monkeypatch):
    """Two layers, whose messages of the least time make both passes wait."""
    layers = [BatchNormLayer(4, 1), BatchNormLayer(2, 3)]
    monkeypatch.setattr("lab.compare.prediction.synchronised_layers", lambda model: layers)
    plan = _batchnorm_plan("vgg11", synchronised=True)
    flags = ("--sync-batchnorm", "off", "--sync-batchnorm", "ours")
    settings = Settings(
        nodes=(1, 4), sync=("all_reduce",), rates=("200mbit",), compute="slow", flags=flags
    )
    assert settings.sync_batchnorm
    assert not Settings(nodes=(4,), sync=("ring",), flags=flags[:2]).sync_batchnorm
    assert _batchnorm_plan("vgg11", synchronised=False) is None
    cells = plan_cells(settings)
    networks = {(4, "200mbit"): Network(0.0, 1e-2, kinds={"all_reduce": Rate(0.0, 1e-2, 10.0)})}
    plain = forecast(cells, networks, slow_step, FOUR, {})
    made = forecast(cells, networks, slow_step, FOUR, {}, batchnorm=plan)
    assert made["none-n1"] == plain["none-n1"]
    before, after = plain["all_reduce-n4-200mbit"], made["all_reduce-n4-200mbit"]
    assert after.step_seconds == pytest.approx(before.step_seconds + 4 * 10.0)
    # a ring of four ranks sends 3/2 of 8 (2C + 1) and of 8C bytes
    more = 1.5 * (8 * (9 + 5) + 8 * (4 + 2))
    assert after.bytes_sent == [pytest.approx(sent + more) for sent in before.bytes_sent]
    assert after.link_bytes[3] == pytest.approx([each + more for each in before.link_bytes[3]])


def test_only_what_the_strategies_send_is_measured():
    assert kinds_of(["all_reduce", "ddp"], {}, FOUR, 4) == ["all_reduce"]
    assert kinds_of(["ddp-9", "ddp-auto"], {"bucket_mb": "auto"}, FOUR, 4) == ["all_reduce"]
    kinds = kinds_of(["gather_scatter", "ring", "none"], {}, FOUR, 4)
    assert kinds == ["exchange", "gather", "scatter"]
    two = {"ranks_per_node": 2}
    found = {
        among: kinds_of(["hierarchical", "ring"], two, FOUR, 8, among=[among])
        for among in ("all", "node", "leaders")
    }
    assert found == {
        "all": ["exchange"],
        "node": ["broadcast", "reduce"],
        "leaders": ["all_reduce"],
    }


def _measured(rank):
    kinds = ["all_reduce", "gather", "scatter", "reduce", "all_gather", "reduce_scatter"]
    return measure_links(rank, 2, kinds=kinds, shaped=False)


def test_messages_are_measured_alike_on_all_ranks():
    mine, other = run_ranks(2, _measured)
    assert mine.kinds == other.kinds
    whole = [SMALL, LARGE, LARGEST]
    half = [size // 2 for size in whole]  # all_gather: a part of each rank; reduce_scatter: two
    assert {kind: [row[0] for row in rows] for kind, rows in mine.kinds.items()} == {
        **dict.fromkeys(("all_reduce", "gather", "scatter", "reduce"), whole),
        **dict.fromkeys(("all_gather", "reduce_scatter"), half),
    }
    for rows in mine.kinds.values():
        assert 0 < rows[0][1] < rows[2][1]
    assert 0 < mine.copy < 1e-7


@pytest.fixture
def even(tmp_path):
    """Return a new profile of VGG-11, whose backward takes the same time in each layer."""
    layers = tuple(
        Layer(
            name,
            SectionTime(1e-3, 0.0),
            SectionTime(0.0, 1e-4),
            tuple(f"{name}.{own}" for own, _ in layer.named_parameters()),
        )
        for name, layer in build_model("vgg11", 10).named_modules()
        if not list(layer.children())
    )
    path = tmp_path / "profile.json"
    Profile("even", "a machine", "cpu", 1, MADE, "vgg11", (32, 32), layers, 5e-3).save(path)
    return path


def test_an_emulated_step_has_a_nodes_share_of_the_batch(even):
    settings = Settings(nodes=(4,), sync=("ring",), compute="even", batch_size=256)
    at, gradients, source = compute_on_nodes(settings, even.parent, None, own_machines=False)
    assert sum(gradients) == 36_924_456
    assert at(4).backward_seconds == pytest.approx(30 * 64e-4)
    assert at(8).backward_seconds == pytest.approx(30 * 32e-4)
    assert source == f"EMULATED by profile even of a machine, {MADE}"


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(namespaces_refused() is not None, reason=str(namespaces_refused()))
def test_emulated_cells_on_links_of_a_rate_from_the_command_line_to_the_report(even, tmp_path):
    """Three nodes' steps last at least as long as predicted; a busy machine makes them longer."""
    flags = (
        "--nodes 1 3 --sync all_reduce_flat ddp ddp-auto --rate 500mbit --steps 5 --warmup 2 "
        "--repeats 1 --dataset digits --output-dir"
    ).split()
    done = start_lab("compare", "--compute", even, *flags, tmp_path).end(timeout_seconds=480)
    assert done.status == 0, done
    [folder] = tmp_path.glob("compare-*")
    results = read_comparison(folder / "results.json")
    cells, predictions = results.cells, results.prediction.cells
    names = ("none-n1", *(f"{sync}-n3-500mbit" for sync in ("all_reduce_flat", "ddp", "ddp-auto")))
    assert [(cell.id, cell.status) for cell in cells] == [(name, "done") for name in names]
    [config] = (folder / "runs" / "PartThree-ddp").glob("auto-*/config.json")
    of_auto = predictions["ddp-auto-n3-500mbit"]
    assert json.loads(config.read_text())["bucket_mb"] == of_auto.bucket_mb
    assert of_auto.step_seconds <= predictions["ddp-n3-500mbit"].step_seconds
    for cell in cells:
        predicted, [repeat] = predictions[cell.id], cell.repeats
        ratio = cell.medians.step / predicted.step_seconds
        assert ratio > 0.9, (cell.id, ratio)
        assert (predicted.in_scope, cell.oversubscribed) == (True, False)
        assert repeat.test_accuracy is None
        assert {loss for _, loss in repeat.losses} == {None}
        sent = [rank.bytes_sent for rank in repeat.ranks]
        assert sent == pytest.approx(predicted.bytes_sent)
    on_the_link = 2 * 2 / 3 * 36_924_456 * 8 / 5e8  # a ring sends 2(N-1)/N of the gradients
    assert cells[1].medians.sync > on_the_link
    assert 1 < predictions[cells[1].id].sync_seconds / on_the_link < 1.5
    page, table = (folder / "report.html").read_text(), (folder / "table.md").read_text()
    assert "EMULATED" in page
    assert "500 Mbit/s" in page
    assert "EMULATED: layers and updates sleep" in table
    for path in folder.glob("*.svg"):
        assert "EMULATED" in path.read_text(), path
    assert json.loads((folder / "profile.json").read_text()) == json.loads(even.read_text())


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(namespaces_refused() is not None, reason=str(namespaces_refused()))
def test_two_ranks_on_each_node_from_the_command_line_to_the_report(even, tmp_path):
    """The kernel counts on each link what the plans say, to 1 %; steps take what was predicted."""
    flags = (
        "--nodes 1 2 --ranks-per-node 2 --sync all_reduce_flat hierarchical --rate 300mbit "
        "--steps 4 --warmup 2 --repeats 1 --batch-size 64 --dataset digits --output-dir"
    ).split()
    done = start_lab("compare", "--compute", even, *flags, tmp_path).end(timeout_seconds=480)
    assert done.status == 0, done
    [folder] = tmp_path.glob("compare-*")
    results = read_comparison(folder / "results.json")
    assert results.settings["ranks_per_node"] == 2
    whole = 36_924_456
    on_links = {
        "all_reduce_flat-n2x2-300mbit": 2 * 3 / 4 * whole,
        "hierarchical-n2x2-300mbit": 2 * 1 / 2 * whole,
    }
    assert [cell.id for cell in results.cells] == ["none-n1", *on_links]
    for cell in results.cells[1:]:
        assert (cell.nodes, cell.ranks_per_node, len(cell.repeats[0].ranks)) == (2, 2, 4)
        predicted = results.prediction.cells[cell.id]
        assert predicted.link_bytes == [(on_links[cell.id],) * 2] * 2
        for rank in cell.repeats[0].ranks:
            assert rank.node == rank.rank // 2
            for counted in (rank.link_sent_bytes, rank.link_received_bytes):
                assert 1 < counted / on_links[cell.id] < 1.01
        assert cell.medians.step / predicted.step_seconds > 0.9, cell.id
    page = unescape((folder / "report.html").read_text()).replace("\N{NO-BREAK SPACE}", " ")
    assert "On 2 emulated nodes with 2 ranks each" in page
    assert "the kernel counted the bytes of the strategies' plans" in page
    config = json.loads(next((folder / "runs").glob("*hierarchical/*/config.json")).read_text())
    assert config["ranks_per_node"] == 2
