"""Predictions for emulated nodes: measured messages, the profile's times, and the event model."""

import json

import pytest

from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.models import build_model
from common.sync.message_cost import GradientSize
from lab.calibrate.link_measurements import LARGE, LARGEST, SMALL, measure_links
from lab.cluster.tools import namespaces_refused
from lab.compare.cells import plan_cells
from lab.compare.prediction import compute_on_nodes, emulated_compute, forecast, kinds_of
from lab.compare.results import read_results
from lab.compare.settings import Settings
from lab.predict.event_model import HEADERS, Network, Rate, loads
from lab.predict.measured_links import MeasuredLinks, network_from
from tests.helpers import run_ranks, start_lab

NOTHING = SectionTime(0.0, 0.0)
FOUR = [GradientSize((size,)) for size in (100, 200, 300, 400)]


def slow_profile():
    """Return a profile of four layers whose backward takes 1, 2, 3 and 4 s.

    Backward runs the last layer first. The third layer has no parameters.
    """
    names = (("a",), ("b",), (), ("c", "d"))
    layers = tuple(
        Layer(str(place), SectionTime(0.1, 0.01), SectionTime(place + 1.0, 0.0), own)
        for place, own in enumerate(names)
    )
    return Profile("slow", "m", "cpu", 1, "2026-11-23T12:00:00", "vgg11", (32, 32), layers, 0.5)


def test_gradients_are_ready_when_their_layers_backward_has_ended():
    step = emulated_compute(slow_profile(), 10, ["a", "b", "c", "d"], FOUR)
    assert (step.before_seconds, step.backward_seconds, step.update_seconds) == pytest.approx(
        (4 * 0.2, 10.0, 0.5)
    )
    ready = [step.ready_seconds(nbytes) for nbytes in (1, 1_600, 1_601, 2_800, 2_801, 3_600, 4_000)]
    assert ready == pytest.approx([4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 10.0])


def found(ranks, *, rate_bits, alpha0, alpha1):
    """Return what ``measure_links`` would return for links that follow the event model."""
    rows = {}
    for kind in ("all_reduce", "gather"):
        rows[kind] = [
            [nbytes, max(alpha1, loads(kind, nbytes, ranks)[1] * 8 * HEADERS / rate_bits + alpha0)]
            for nbytes in (SMALL, LARGE, LARGEST)
        ]
    return MeasuredLinks(ranks, rows, sum=1e-10, copy=2e-10)


@pytest.mark.parametrize("known", [2e8, None])
def test_the_network_is_that_of_the_links(known):
    network = network_from(found(4, rate_bits=2e8, alpha0=0.003, alpha1=0.007), rate_bits=known)
    for kind in ("all_reduce", "gather"):
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
    settings = Settings(
        nodes=(1, 4), sync=("all_reduce", "overlapped", "topk"), rates=("200mbit",), compute="slow"
    )
    cells = plan_cells(settings)
    network = Network(0.0, 1e-2, kinds={"all_reduce": Rate(0.0, 1e-2, 10.0)})
    made = forecast(
        cells,
        {(4, "200mbit"): network},
        lambda nodes: emulated_compute(slow_profile(), 10, ["a", "b", "c", "d"], FOUR),
        FOUR,
        {"bucket_mb": 1_500 / 2**20},
        caveats={},
    )
    alone = 0.8 + 10.0 + 0.5
    assert made["none-n1"]["step_seconds"] == pytest.approx(alone)
    each = [max(10.0, 1.5 * size * 1e-2) for size in FOUR]
    assert made["all_reduce-n4-200mbit"]["step_seconds"] == pytest.approx(alone + sum(each))
    # parameters d; c and b; a
    buckets = [max(10.0, 1.5 * size * 1e-2) for size in (1_600, 2_000, 400)]
    ends = 4.0 + buckets[0]
    for ready, seconds in zip((9.0, 10.0), buckets[1:], strict=True):
        ends = max(ready, ends) + seconds
    assert made["overlapped-n4-200mbit"]["step_seconds"] == pytest.approx(0.8 + ends + 0.5)
    assert made["overlapped-n4-200mbit"]["in_scope"]
    assert not made["topk-n4-200mbit"]["in_scope"]
    assert len(made["all_reduce-n4-200mbit"]["bytes_sent"]) == 4


def test_only_what_the_strategies_send_is_measured():
    assert kinds_of(["all_reduce", "ddp"], {}, FOUR, 4) == ["all_reduce"]
    assert kinds_of(["ddp-9", "ddp-auto"], {"bucket_mb": "auto"}, FOUR, 4) == ["all_reduce"]
    assert set(kinds_of(["gather_scatter", "ring", "none"], {}, FOUR, 4)) == {
        "gather",
        "scatter",
        "exchange",
    }


def test_an_emulated_step_has_a_nodes_share_of_the_batch(tmp_path):
    _vgg_profile().save(tmp_path / "profile.json")
    settings = Settings(nodes=(4,), sync=("ring",), compute="even", batch_size=256)
    at, gradients, source = compute_on_nodes(settings, tmp_path, None, own_machines=False)
    assert sum(gradients) == 36_924_456
    assert at(4).backward_seconds == pytest.approx(30 * 64e-4)
    assert at(8).backward_seconds == pytest.approx(30 * 32e-4)
    assert source == "EMULATED by profile even of a machine, 2026-11-23T12:00:00"


def _measured(rank):
    kinds = ["all_reduce", "gather", "scatter", "reduce", "all_gather", "reduce_scatter"]
    return MeasuredLinks(**measure_links(rank, 2, kinds=kinds, shaped=False))


def test_messages_are_measured_alike_on_all_ranks():
    mine, other = run_ranks(2, _measured)
    assert mine.kinds == other.kinds
    whole = ("all_reduce", "gather", "scatter", "reduce")
    sizes = {kind: [SMALL, LARGE, LARGEST] for kind in whole}
    sizes["all_gather"] = [SMALL // 2, LARGE // 2, LARGEST // 2]  # each of two ranks has a part
    sizes["reduce_scatter"] = [SMALL // 2, LARGE // 2, LARGEST // 2]  # two at a time
    assert {kind: [row[0] for row in rows] for kind, rows in mine.kinds.items()} == sizes
    for rows in mine.kinds.values():
        assert 0 < rows[0][1] < rows[2][1]
    assert 0 < mine.copy < 1e-7


def _vgg_profile():
    model = build_model("vgg11", 10)
    layers = tuple(
        Layer(
            name,
            SectionTime(1e-3, 0.0),
            SectionTime(0.0, 1e-4),
            tuple(f"{name}.{own}" for own, _ in layer.named_parameters()),
        )
        for name, layer in model.named_modules()
        if not list(layer.children())
    )
    return Profile(
        "even", "a machine", "cpu", 1, "2026-11-23T12:00:00", "vgg11", (32, 32), layers, 5e-3
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(500)
@pytest.mark.skipif(
    namespaces_refused() is not None, reason=f"no cluster here: {namespaces_refused()}"
)
def test_emulated_cells_on_links_of_a_rate_from_the_command_line_to_the_report(tmp_path):
    """Measured steps of four nodes match the prediction, on however many cores there are.

    A busy machine makes steps longer, never shorter.
    """
    _vgg_profile().save(tmp_path / "even.json")
    flags = (
        "--nodes 1 4 --sync all_reduce_flat ddp ddp-auto --rate 200mbit --steps 5 --warmup 2 "
        "--repeats 1 --dataset digits"
    ).split()
    profile = ("--compute", tmp_path / "even.json")
    started = start_lab("compare", *flags, *profile, "--output-dir", tmp_path)
    done = started.end(timeout_seconds=480)
    assert done.status == 0, done
    [folder] = tmp_path.glob("compare-*")
    results = read_results(folder / "results.json")
    cells = {cell["id"]: cell for cell in results["cells"]}
    assert {name: cell["status"] for name, cell in cells.items()} == dict.fromkeys(
        ("none-n1", "all_reduce_flat-n4-200mbit", "ddp-n4-200mbit", "ddp-auto-n4-200mbit"), "done"
    )
    [config] = (folder / "runs" / "PartThree-ddp").glob("auto-*/config.json")
    of_auto = results["prediction"]["cells"]["ddp-auto-n4-200mbit"]
    assert json.loads(config.read_text())["bucket_mb"] == of_auto["bucket_mb"]
    default = results["prediction"]["cells"]["ddp-n4-200mbit"]["step_seconds"]
    assert of_auto["step_seconds"] <= default
    for name, cell in cells.items():
        predicted = results["prediction"]["cells"][name]
        assert (
            0.9 * predicted["step_seconds"]
            < cell["median"]["step"]
            < 1.5 * predicted["step_seconds"]
        ), name
        assert predicted["in_scope"]
        assert not cell["oversubscribed"]
        assert cell["repeats"][0]["test_accuracy"] is None
        assert {loss for _, loss in cell["repeats"][0]["losses"]} == {None}
        sent = [rank["bytes_sent"] for rank in cell["repeats"][0]["ranks"]]
        assert sent == pytest.approx(predicted["bytes_sent"])
    assert cells["all_reduce_flat-n4-200mbit"]["median"]["sync"] > 1.5 * 36_924_456 * 8 / 2e8, (
        "no link is faster than its rate"
    )
    page, table = (folder / "report.html").read_text(), (folder / "table.md").read_text()
    assert "EMULATED" in page
    assert "200 Mbit/s" in page
    assert "EMULATED: layers and updates sleep" in table
    for path in [*folder.glob("*.svg")]:
        assert "EMULATED" in path.read_text(), path
    assert json.loads((folder / "profile.json").read_text()) == json.loads(
        (tmp_path / "even.json").read_text()
    )
