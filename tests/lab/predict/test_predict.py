"""``lab predict``: its numbers, its text, what it refuses, and that it does not need torch."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from rich.console import Console

from common.models import build_model
from common.sync import STRATEGIES, build_sync
from lab.cli import main
from lab.predict.bucket_choice import SIZES_MB
from lab.predict.calibration_file import LARGE_STEP, load_calibration, reference_path
from lab.predict.cluster import TypicalCluster
from lab.predict.compute_model import OPTIMIZERS
from lab.predict.event_model import HEADERS, Network
from lab.predict.own_model import with_gradient_bytes, with_own_model, with_own_step
from lab.predict.priors import load_priors
from lab.predict.scenario import Scenario
from lab.predict.tables import message_plans, predict_table, scaling_limits_of
from lab.strategy_style import color
from lab.units import parse_latency, parse_parameters, parse_rate
from tests.helpers import ROOT

REFERENCE = load_calibration(reference_path())
NCCL = TypicalCluster.of("nccl", "tcp-vm")
HERE = {"rate_bits": None, "latency_seconds": None}


def scenario(**changes):
    """Return the reference's training on links of 1 Gbit/s, with these changes."""
    links = {"rate_bits": 1e9, "latency_seconds": 2e-4}
    training = {"calibration": REFERENCE, "batch_size": 256, "scaling": "strong"}
    return Scenario(**training | links | changes)


def own_bert():
    """Return a calibration for BERT-large on the reader's own nodes."""
    return with_own_model(
        REFERENCE, model="bert_large", parameters=None, step_seconds=0.145, batch=16
    )


def table(nodes, strategies, **changes):
    options = {"ranks_per_node": changes.get("ranks_per_node", 1)}
    rows = predict_table(nodes, message_plans(strategies, options), scenario(**changes))
    return {(row.sync, row.nodes): row for row in rows}


def predict(*words, links="--rate 1gbit --latency 0.2ms"):
    """Run ``lab predict`` with the reference calibration; return its exit status."""
    reference = ("--calibration", str(reference_path()))
    return main(["predict", *reference, "--nodes", "8", *links.split(), *map(str, words)])


def test_speedup_and_efficiency_are_those_of_the_step_times():
    strong = table([1, 8], ["ring"])
    one, eight = strong["ring", 1], strong["ring", 8]
    assert (one.speedup, one.efficiency, one.prediction.sync_seconds) == pytest.approx((1, 1, 0))
    alone = one.prediction.step_seconds
    assert eight.speedup == pytest.approx(alone / eight.prediction.step_seconds)
    assert eight.efficiency == pytest.approx(eight.speedup / 8)
    weak = table([8], ["ring"], scaling="weak")["ring", 8]
    assert weak.prediction.compute_seconds == pytest.approx(one.prediction.compute_seconds)
    assert weak.speedup == pytest.approx(8 * alone / weak.prediction.step_seconds)


def test_a_slower_strategy_has_no_higher_speedup():
    # On one node of 8 ranks all_reduce takes longer than ddp, so over its own step it gains more.
    own = with_own_step(REFERENCE, 2.0, 32)
    node = {"calibration": own, "own_nodes": True, "cluster": NCCL, "step_seconds": 2.0}
    shared = {"ranks_per_node": 8, "batch_size": 32, "step_samples": 32, "scaling": "weak"}
    names = ["all_reduce", "ddp", "none"]
    rows = table([1, 2], names, **node, **shared, rate_bits=1e9, inside_bits=1e9)
    slow, fast = rows["all_reduce", 1], rows["ddp", 1]
    assert slow.prediction.step_seconds > 1.001 * fast.prediction.step_seconds
    assert (fast.speedup, rows["none", 1].speedup) == pytest.approx((1, 1))
    for nodes in (1, 2):
        slow, fast = rows["all_reduce", nodes], rows["ddp", nodes]
        seconds = slow.prediction.step_seconds / fast.prediction.step_seconds
        assert fast.speedup / slow.speedup == pytest.approx(seconds)
    assert (
        table([2], ["all_reduce"], **node, **shared, rate_bits=1e9, inside_bits=1e9)[
            "all_reduce", 2
        ].speedup
        > rows["all_reduce", 2].speedup
    )


BERT = {"step_seconds": 0.145, "step_samples": 16, "batch_size": 16, "scaling": "weak"}
BERT_PARAMETERS = sum(size.entries for size in own_bert().gradient_sizes)


@pytest.mark.parametrize(("optimizer", "nbytes"), [("sgd", 12), ("adam", 28), ("lamb", 48)])
def test_an_update_takes_as_long_as_its_bytes_and_shards_share_it(optimizer, nbytes):
    known = {"calibration": own_bert(), "own_nodes": True, "cluster": NCCL, **BERT}
    known["update_bytes"] = OPTIMIZERS[optimizer]
    update = BERT_PARAMETERS * nbytes / 450e9
    [prior] = [prior for prior in load_priors() if prior.name == "nccl.update_gbytes"]
    assert prior.typical == 450
    steps = table([1, 8], ["ddp", "ddp_zero1"], **known)
    for name in ("ddp", "ddp_zero1"):  # one rank's step is the reader's own
        assert steps[name, 1].prediction.step_seconds == pytest.approx(0.145)
    whole, shared = (steps[name, 8].prediction for name in ("ddp", "ddp_zero1"))
    saved = (whole.compute_seconds - whole.slowed_seconds) - (
        shared.compute_seconds - shared.slowed_seconds
    )
    assert saved == pytest.approx(NCCL.values.straggling(8) * update * 7 / 8)


def test_the_step_of_a_node_has_the_update_as_its_ranks_shared_it():
    known = {"calibration": own_bert(), "own_nodes": True, "cluster": NCCL, **BERT}
    node = {"ranks_per_node": 8, "node_step_seconds": 0.15, "rate_bits": 1e11}
    steps = table([1, 4], ["fsdp", "ddp"], **known, **node)
    assert steps["fsdp", 1].prediction.step_seconds == pytest.approx(0.15)
    fsdp, ddp = (steps[name, 4].prediction for name in ("fsdp", "ddp"))
    saved = ddp.compute_seconds - ddp.slowed_seconds - fsdp.compute_seconds + fsdp.slowed_seconds
    update = BERT_PARAMETERS * 20 / 450e9
    assert saved == pytest.approx(NCCL.values.straggling(4) * update * (1 / 8 - 1 / 32))


def test_an_update_is_at_most_three_quarters_of_a_step(capsys):
    own = ["--model", "gpt2_xl", "--step-time", "10ms", "--batch", "1", "--sync", "ddp_zero1"]
    assert predict(*own, "--json", links="--rate 1tbit --transport rdma") == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["prediction"]["compute_seconds"] > 0.25 * 0.01


def test_a_transformer_is_trained_with_adam_unless_the_reader_says_otherwise(capsys):
    own = ["--model", "bert_large", "--step-time", "145ms", "--batch", "16", "--sync", "ddp"]
    for given, nbytes in (((), 28), (("--optimizer", "sgd"), 12)):
        assert predict(*own, *given) == 0
        text = capsys.readouterr().out
        assert f"{nbytes} bytes a parameter" in text
        assert f"{1e3 * BERT_PARAMETERS * nbytes / 450e9:.3g} ms of it the update's" in text


def test_auto_is_the_best_size_of_buckets_for_each_number_of_nodes():
    sizes = [f"ddp-{size:g}" for size in SIZES_MB]
    rows = table([1, 4, 64], ["ddp", "ddp-auto", *sizes])
    for nodes in (1, 4, 64):
        step = {
            name: row.prediction.step_seconds for (name, of), row in rows.items() if of == nodes
        }
        best = min(step.values())
        expected = best if best < 0.99 * step["ddp"] else step["ddp"]
        assert step["ddp-auto"] == expected
        assert (step["ddp-auto"] < step["ddp"]) == (nodes > 1)
    by_flag = message_plans(["ddp", "ring"], {"bucket_mb": "auto"})
    limits = scaling_limits_of(by_flag, scenario())
    assert [one.sync for one in limits] == ["ddp", "ring"] * 2
    default = scaling_limits_of(message_plans(["ddp"]), scenario())
    assert limits[0].speedup >= default[0].speedup


def test_the_rate_is_that_of_the_links():
    fast, slow = (
        table([4], ["ring", "gather_scatter"], rate_bits=rate, latency_seconds=None)
        for rate in (1e9, 1e8)
    )
    payload = sum(REFERENCE.gradient_sizes)
    for name, share in (("ring", 1.5), ("gather_scatter", 6)):
        more = slow[name, 4].prediction.sync_seconds - fast[name, 4].prediction.sync_seconds
        assert more == pytest.approx(share * payload * 8 * 1.06 * (1 / 1e8 - 1 / 1e9), rel=0.01)
    assert fast["gather_scatter", 4].prediction.bytes_sent_root == 3 * payload
    assert fast["gather_scatter", 4].prediction.bytes_sent_others == payload


def test_what_holds_only_with_a_word():
    assert "BatchNorm" in table([200], ["ring"])["ring", 200].note
    assert table([200], ["ring"], scaling="weak")["ring", 200].note == ""
    assert "no gradient exchange" in table([2], ["none"])["none", 2].note
    assert table([2], ["ring"], **HERE)["ring", 2].note == ""
    assert "share" in table([16], ["ring"], **HERE)["ring", 16].note


def test_what_a_prediction_leaves_out_is_said_once(capsys):
    assert predict("--sync", "ring", "fsdp", "topk", "ddp_powersgd", "--nodes", 1, 2, 4) == 0
    lines = capsys.readouterr().out.splitlines()
    said = [line.split(": ")[0] for line in lines if "no calibration" in line or "NCCL" in line]
    assert said == ["fsdp", "topk", "ddp_powersgd"]
    rows = table([1, 2], ["ring", "fsdp"])
    with_caveat = [key for key, row in rows.items() if row.caveat]
    assert with_caveat == [("fsdp", 2)]
    assert "fetched one ahead" in rows["fsdp", 2].caveat


def test_ranks_of_one_machine_share_its_cores_and_calibrated_nodes_do_not():
    here, apart, nodes = (
        {count: row.prediction.compute_seconds for (_, count), row in rows.items()}
        for rows in (
            table([1, 2], ["ring"], **HERE),
            table([1, 2], ["ring"], rate_bits=1e12, latency_seconds=None),
            table([1, 8], ["ring"], **HERE, calibration=replace(REFERENCE, ranks=4, ranks_here=1)),
        )
    )
    assert here[1] == apart[1]
    assert here[2] > 1.3 * apart[2]
    assert nodes[8] < nodes[1] / 2


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "1gbit", 1e9),
        (parse_rate, "200mbit", 2e8),
        (parse_rate, "2.5 Gbit/s", 2.5e9),
        (parse_rate, None, None),
        (parse_latency, "0.2ms", 2e-4),
        (parse_latency, "50us", 5e-5),
        (parse_latency, "50µs", 5e-5),
        (parse_latency, "1s", 1.0),
        (parse_parameters, "12775000", 12_775_000),
        (parse_parameters, "1.2e7", 12_000_000),
        (parse_parameters, "25.6M", 25_600_000),
        (parse_parameters, " .7b ", 700_000_000),
        (parse_parameters, None, None),
    ],
)
def test_rates_and_latencies_are_read(parse, text, value):
    assert parse(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rate 0gbit", "more than 0"),
        ("--rate fast", "200mbit"),
        ("--rate 10", "10gbit"),
        ("--rate 1ms", "1gbit"),
        ("--latency 0.2", "0.2ms"),
        ("--latency=-1ms", "0.2ms"),
        ("--latency 1gbit", "0.2ms"),
        ("--nodes 0", "100,000"),
        ("--nodes 4 100001", "--nodes: got 100001, give 1 to 100,000"),
        ("--sync carrier_pigeon", "halving_doubling"),
        ("--batch-size 1", "--batch-size: got 1, give 2 or more"),
        ("--batch-size 0 --batch 8 --step-time 1s", "--batch-size: got 0, give 2 or more"),
        ("--batch-size 1 --batch 8 --step-time 1s --model resnet50", "got 1, give 2 or more"),
        ("--batch 0 --step-time 1s", "--batch: got 0, give 1 or more"),
        ("--batch=-8 --step-time 1s", "--batch: got -8, give 1 or more"),
        ("--rate 1e3", "10gbit"),
        ("--rate 1e400gbit", "--rate: got '1e400gbit', give a smaller number"),
        ("--step-time 0.12 --batch 8", "--step-time: got '0.12', give a number with a unit"),
        ("--bucket-mb fast", "--bucket-mb: got 'fast', give a number above 0, or auto"),
        ("--bucket-mb 0", "got '0', give a number above 0, or auto"),
        ("--software-gbit 0", "--software-gbit: got 0.0, give more than 0"),
        ("--model resnet50", "of vgg11: add --step-time and --batch of resnet50 on one"),
        ("--model resnet51", "resnet50"),
        ("--model vgg16 --parameters 1M", "are both given"),
        ("--step-time 120ms", "go together"),
        ("--accumulation-steps 0", "--accumulation-steps: got 0, give 1 or more"),
        ("--accumulation-steps 200", "got 256, give 400 or more, for 200 micro-batches"),
        ("--gradient-type int8", "fp16"),
        ("--parameters 25.6", "25.6M or 7B"),
        ("--parameters 0", "give more than 0"),
        ("--parameters 25M/s", "give a number, alone or with a unit (k, m, b)"),
        ("--parameters 99999B", "give at most 1e+13"),
        ("--ranks-per-node 0", "--ranks-per-node: got 0, give 1 to 1,024"),
        ("--ranks-per-node 2 --rate-inside fast", "--rate-inside"),
        ("--rate-inside 100gbit", "--ranks-per-node"),
        ("--parameters 25M --step-time 1s --batch 8 --sync-batchnorm on", "give --model in place"),
        ("--sync-batchnorm sometimes", "on"),
        ("--sync ring --figure FOLDER/steps.gif", "ends in .png"),
        ("--sync ring --figure FOLDER/missing/steps.png", "a folder that exists"),
    ],
)
def test_bad_input_is_named_with_what_to_do(words, said, tmp_path, capsys):
    assert predict(*words.replace("FOLDER", str(tmp_path)).split()) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_json_holds_the_rows_and_how_far_each_strategy_scales_strongly_and_weakly(capsys):
    assert predict("--json", "--nodes", 1, 8) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == 2 * len(STRATEGIES)
    assert all(
        (row["prediction"]["bytes_sent_others"] > 0) == (row["nodes"] > 1 and row["sync"] != "none")
        for row in printed["rows"]
    )
    limits = {(limit["sync"], limit["scaling"]): limit for limit in printed["scaling"]}
    assert set(limits) == {(name, scaling) for name in STRATEGIES for scaling in ("strong", "weak")}
    assert limits["none", "weak"]["nodes"] is None
    assert limits["none", "strong"]["limit"] == 128  # at least two samples a node
    assert limits["gather_scatter", "strong"]["nodes"] == 1
    assert limits["gather_scatter", "weak"]["held_by"] == "root's link"
    ring = limits["ring", "weak"]
    assert ring["held_by"] == "latency"
    at_its_limit = table([ring["nodes"]], ["ring"], scaling="weak")["ring", ring["nodes"]]
    assert ring["speedup"] == pytest.approx(at_its_limit.speedup)


def test_the_text_says_where_its_numbers_come_from_and_where_each_strategy_stops(capsys):
    assert predict() == 0
    lines = capsys.readouterr().out.splitlines()
    assert REFERENCE.name in lines[0]
    assert "NOT" not in lines[0]
    network = "links of 1 Gbit/s (6 % headers); all_reduce: 200 µs a message, 118 MB/s"
    assert network in lines[2]
    rows = {name: [line for line in lines if line.startswith(f" {name} ")] for name in STRATEGIES}
    assert {len(both) for both in rows.values()} == {2}
    none, root = (rows[name][1].split(maxsplit=1)[1] for name in ("none", "gather_scatter"))
    assert none.split() == "128 19.4 samples all never 100,000 -".split()
    assert root.split() == "1 1.00 root's link 2 11 1.84 root's link".split()
    assert any("so up to 128 nodes." in line for line in lines)


def test_ranks_of_one_machine_end_with_its_cores(capsys):
    assert predict(links="") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("share its 2 cores. Give --rate to predict separate machines")
    assert predict("--json", links="") == 0
    assert json.loads(capsys.readouterr().out)["scaling"] == []


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_terminal_of_80_columns_cuts_nothing(scaling, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        "lab.predict.printing.Console",
        partial(Console, file=written, force_terminal=True, width=80),
    )
    assert predict("--nodes", 1, 100_000, "--scaling", scaling) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())
    assert "…" not in text
    lines = [line for line in text.splitlines() if "a step (80 %" not in line]
    tables = [line for line in lines if {*line.split()[:1]} & {*STRATEGIES}]
    assert len(tables) == 3 * len(STRATEGIES)
    assert max(map(len, tables)) <= 80


@pytest.mark.slow
def test_the_figure_has_a_line_for_each_strategy(tmp_path):
    assert predict("--scaling", "weak", "--figure", tmp_path / "steps.svg") == 0
    drawn = (tmp_path / "steps.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
    names = [name for text in texts for name in text.split(", ") if name in STRATEGIES]
    # one label beside each of the three panels
    assert sorted(names) == sorted([*STRATEGIES] * 3)
    assert {"Gbit/s of each link, 8 nodes", "you"} <= {text.strip() for text in texts}
    # two strategies whose lines coincide share a label
    assert "gather_scatter, gather_scatter_flat" in texts
    assert {"100,000", "seconds a step", "efficiency", "Weak scaling, predicted"} <= set(texts)
    assert any(REFERENCE.name in text for text in texts)
    assert predict("--sync", "ring", "--figure", tmp_path / "steps.PNG") == 0
    assert len(imread(tmp_path / "steps.PNG", format="png")) > 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "banded"),
    [
        (["ddp"], ["ddp"]),
        (["ring", "ddp_powersgd", "gather_scatter"], ["ring", "ddp_powersgd", "gather_scatter"]),
        (list(STRATEGIES), ["overlapped"]),  # with ddp's curve, the answer's
    ],
)
def test_the_figure_has_a_band_for_the_interval(names, banded, tmp_path, monkeypatch):
    """Of many strategies only the answer's has one; its ends are those of the table."""
    bands = []
    fill_between = Axes.fill_between

    def noted(axis, numbers, lows, highs, **style):
        ends = zip(lows, highs, strict=True)
        bands.append((axis.get_ylabel(), style["color"], dict(zip(numbers, ends, strict=True))))
        return fill_between(axis, numbers, lows, highs, **style)

    monkeypatch.setattr(Axes, "fill_between", noted)
    assert predict("--sync", *names, "--figure", tmp_path / "steps.svg") == 0
    assert sorted(drawn for _, drawn, _ in bands) == sorted(3 * [color(name) for name in banded])
    row = table([8], banded[:1])[banded[0], 8]
    own = [(label, ends) for label, drawn, ends in bands if drawn == color(banded[0])]
    for label, ends in own:
        if label == "efficiency":
            assert ends[8] == pytest.approx([end / 8 for end in row.speedup_range])
            continue
        number = 8 if 8 in ends else 1.0  # nodes, or Gbit/s
        assert ends[number] == pytest.approx([row.low_seconds, row.high_seconds])
    assert "80 % intervals" in (tmp_path / "steps.svg").read_text()


def test_the_reference_says_that_it_is_not_this_machine(capsys, monkeypatch, tmp_path):
    path = tmp_path / "none.json"
    monkeypatch.setattr("lab.predict.calibration_file.calibration_path", lambda: path)
    assert main(["predict"]) == 0
    assert capsys.readouterr().out.startswith("NOT this machine")


def test_what_a_change_would_bring_is_what_the_changed_prediction_says(capsys):
    now = table([8], ["ddp"])["ddp", 8]
    seconds = now.prediction.step_seconds
    faster = table([8], ["ddp"], rate_bits=2e9)["ddp", 8].prediction.step_seconds
    more = table([16], ["ddp"])["ddp", 16].prediction.step_seconds
    assert now.gains["network"] == pytest.approx(seconds / faster)
    assert now.gains["nodes"] == pytest.approx(seconds / more)
    assert 1 < now.gains["compute"] < 2
    alone = now.prediction.compute_seconds - now.prediction.slowed_seconds
    assert now.gains["no messages"] == pytest.approx(seconds / alone)
    weak = table([8, 16], ["ring"], scaling="weak")
    ratio = 2 * weak["ring", 8].prediction.step_seconds / weak["ring", 16].prediction.step_seconds
    assert weak["ring", 8].gains["nodes"] == pytest.approx(ratio)

    assert predict("--sync", "all_reduce", "ddp", "none") == 0
    sentence = capsys.readouterr().out.splitlines()[3]
    assert "ddp on 8 nodes" in sentence
    assert f"network twice as fast would bring most: {now.gains['network']:.2f} times" in sentence
    assert f"16 nodes instead of 8 would make it slower ({now.gains['nodes']:.2f})" in sentence
    assert f"No network can bring more than {now.gains['no messages']:.2f} times" in sentence
    assert "not decided" not in sentence
    assert now.best_shares["network"] > 0.9
    none = table([8], ["none"])["none", 8]
    assert none.gains == pytest.approx(none.gains | {"compute": 2, "network": 1, "no messages": 1})


def test_rates_are_compared_and_the_softwares_limit_is_said(capsys):
    rates = ("1gbit", "25gbit")
    assert predict("--sync", "ring", "--json", links=f"--rate {' '.join(rates)}") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["rate"] for row in rows] == list(rates)
    slow, fast = (row["prediction"]["step_seconds"] for row in rows)
    assert predict("--sync", "ring", links=f"--rate {' '.join(rates)}") == 0
    text = capsys.readouterr().out
    [row] = [line.split() for line in text.splitlines() if line.startswith(" ring")]
    assert row[2:4] + row[7:9] == [f"{slow * 1e3:.0f}", "ms", f"{fast * 1e3:.0f}", "ms"]
    assert f"passes {REFERENCE.network.software_bits / 1e9:.3g} Gbit/s at most" in text
    assert "200 µs a message (typical; --latency sets it)" in text
    assert predict("--json", "--sync", "ring", "--software-gbit", 100, links="--rate 25gbit") == 0
    [lifted] = json.loads(capsys.readouterr().out)["rows"]
    assert lifted["prediction"]["step_seconds"] < fast


def typical(*words, links="--rate 10gbit 25gbit", capsys):
    """Return the text and the rows of a reader's own nodes, which nobody calibrated."""
    own = "--parameters 25.6M --step-time 120ms --batch 64 --sync ddp ring".split()
    assert predict(*own, *words, links=links) == 0
    text = capsys.readouterr().out
    assert predict(*own, *words, "--json", links=links) == 0
    return text, json.loads(capsys.readouterr().out)["rows"]


def test_what_is_assumed_of_a_cluster_is_said_and_what_measures_it(capsys):
    text, _ = typical(capsys=capsys)
    values = NCCL.values
    shown = (
        "NCCL over TCP on virtual machines, typical of such clusters: at most "
        f"{values.most_bits / 1e9:.3g} Gbit/s",
        f"{10 * values.line_share:.3g} of 10 Gbit/s reach payload",
        f"{values.most_bits / 1e9:.3g} of 25 Gbit/s reach payload",
        "50 µs on the link (typical; --latency sets it)",
        f"{1e6 * values.message_seconds:.3g} µs in software",
        f"scatter by {100 * values.straggler:.1f} %",
        "`lab calibrate` or --fit measures yours",
    )
    for words in shown:
        assert words in text
    assert "calibrated;" not in text
    assert "messages cost what their links cost" not in text
    text, _ = typical(
        "--latency", "10us", "--software-gbit", 5, links="--rate 9gbit", capsys=capsys
    )
    assert "at most 5 Gbit/s of payload a node (--software-gbit)" in text
    assert "5 of 9 Gbit/s reach payload; a message takes 10 µs on the link and" in text
    assert main("predict --rate 1gbit --backend gloo --nodes 1 --sync ring".split()) == 0
    assert "Gloo over TCP on virtual machines, typical of such clusters" in capsys.readouterr().out


def _links_above(software_bits):
    """Return what the answer says of the rate from which on a node's software limits its link."""
    return f"Links above {software_bits / NCCL.values.line_share / 1e9:.3g} Gbit/s would bring"


@pytest.mark.parametrize(
    ("words", "rates", "said"),
    [
        ("", "1gbit 25gbit 50gbit 90gbit", f"{_links_above(NCCL.most_bits)} nothing more, since"),
        ("", "25gbit", f"{_links_above(NCCL.most_bits)} nothing more, since"),
        ("", "10gbit", f"{_links_above(NCCL.most_bits)} nothing more, since"),
        ("--software-gbit 44", "25gbit 60gbit", f"{_links_above(44e9)} nothing more"),
        ("", "1gbit 5gbit", ""),
        ("--transport rdma", "20gbit", ""),
        ("--software-gbit 400", "25gbit 100gbit", ""),
        (
            "--transport rdma",
            "50gbit 400gbit",
            "50gbit: links above 50 Gbit/s would bring nothing more",
        ),
        ("--transport rdma", "400gbit 3200gbit", ""),
    ],
)
def test_the_answer_says_where_the_software_limits_the_links(words, rates, said, capsys):
    text, rows = typical(*words.split(), links=f"--rate {rates}", capsys=capsys)
    lines = text.splitlines()
    limits = [line for line in lines if "Gbit/s at most" in line]
    assert len(limits) == bool(said)
    if said:
        assert limits[0].startswith(said)
        assert "--software-gbit" in limits[0]
        answers = [line for line in lines if "No network can bring" in line]
        assert lines.index(limits[0]) == lines.index(answers[-1]) + 1
        assert "warning" not in text
    if "90gbit" in rates:
        steps = {row["prediction"]["step_seconds"] for row in rows if row["rate"] != "1gbit"}
        assert len(steps) == 2  # ddp's and ring's


def test_an_undecided_purchase_is_named_with_what_would_decide(capsys):
    text, rows = typical(capsys=capsys)
    open_, decided = (row for row in rows if row["sync"] == "ddp")
    answers = [line for line in text.splitlines() if "No network can bring" in line]
    assert "not decided: a network twice as fast" in answers[0]
    for change in ("network", "compute"):
        low, high = open_["gain_ranges"][change]
        assert f"{open_['gains'][change]:.2f}" in answers[0]
        assert f"(80 %: {low:.2f} to {high:.2f})" in answers[0]
        assert 0.2 < open_["best_shares"][change] < 0.8
        assert open_["best_shares"][change] + decided["best_shares"][change] > 0.2
    assert decided["best_shares"]["compute"] > 0.8
    assert answers[1].startswith("25gbit: ddp on 8 nodes takes ")
    assert "Processors twice as fast would bring most" in answers[1]
    [deciding] = [line for line in text.splitlines() if line.startswith("What would decide it")]
    for word in ("`lab calibrate`", "--fit", "`iperf3`"):
        assert word in deciding
    text, _ = typical(links="--rate 1gbit", capsys=capsys)
    assert "decide" not in text
    assert "A network twice as fast would bring most" in text
    text, _ = typical("--nodes", 100_000, "--backend", "gloo", links="--rate 1gbit", capsys=capsys)
    assert "Nothing would bring much" in text
    assert "200,000" not in text


def test_each_step_has_its_interval(capsys):
    """In the table, and per rate; a step that the reader gave is certain."""
    words = ("--nodes", 1, 8)
    text, rows = typical(*words, links="--rate 1gbit", capsys=capsys)
    table_rows = [line.split() for line in text.splitlines() if line.startswith(" ddp ")]
    one, eight = (row for row in rows if row["sync"] == "ddp")
    assert one["low_seconds"] == one["high_seconds"] == one["prediction"]["step_seconds"]
    assert one["speedup_range"] == [1, 1]
    assert table_rows[0][4] == "-"
    low, high = eight["low_seconds"], eight["high_seconds"]
    assert low < eight["prediction"]["step_seconds"] < high
    ends = f"{1e3 * low:.0f}–{1e3 * high:.0f}" if high < 1 else f"{low:.3g}–{high:.3g}"
    assert table_rows[1][4] == ends
    assert f"(80 %: {ends.replace('–', ' to ')} " in text
    slowest, fastest = eight["speedup_range"]
    assert slowest < eight["speedup"] < fastest
    assert fastest == pytest.approx(8 * one["low_seconds"] / low, rel=0.01)
    text, _ = typical(*words, links="--rate 1gbit 10gbit", capsys=capsys)
    assert ends in text


@pytest.mark.parametrize("rates", ["1gbit 10gbit", "1gbit 2gbit 5gbit 10gbit 25gbit"])
def test_rates_side_by_side_fit_a_pipe(rates, capsys):
    assert predict("--sync", "ring", "ddp_powersgd", links=f"--rate {rates}") == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith(" ")]
    assert max(map(len, shown)) <= 110
    assert "…" not in "".join(shown)
    assert "".join(shown).count("–") == 2 * len(rates.split())


def test_one_sample_on_one_node_is_no_plural(capsys):
    own = "--parameters 1M --step-time 100ms --batch 1 --scaling strong --sync ring ddp".split()
    assert predict(*own, "--nodes", 1, "--bucket-mb", "auto", links="--rate 1gbit") == 0
    text = capsys.readouterr().out
    assert "strong: 1 sample for all nodes together" in text
    assert "so up to 1 node." in text
    assert "weak: 1 sample for each node, up to 100,000 nodes" in text
    assert "1 node: ddp takes" in text
    assert not re.search(r"(?<![\d,.])1 (nodes|samples)", text)


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [("--model resnet50", None), ("--parameters 25.6M", 102_400_000), ("", 36_924_456)],
)
def test_ones_own_model_and_node(capsys, model, nbytes):
    """Its batch is that of a node; no strategy becomes slower on a faster link."""
    own = f"{model} --step-time 120ms --batch 64 --json --nodes 1 2 --sync ring ddp sharded"
    assert predict(*own.split(), links="") == 2
    assert "add --rate" in capsys.readouterr().err
    rates = "--rate 1gbit 10gbit 25gbit 50gbit 90gbit"
    assert predict(*own.split(), links=rates) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    one, _, _, two = rows[:4]
    assert one["prediction"]["step_seconds"] == pytest.approx(0.12)
    for sync in ("ring", "ddp", "sharded"):
        taken = [row["prediction"]["step_seconds"] for row in rows if row["sync"] == sync][1::2]
        assert taken == sorted(taken, reverse=True)
        assert 0.12 < taken[-1] == taken[-2] < taken[1] < taken[0] / 2  # software limits the last
    if nbytes is None:
        nbytes = 4 * sum(p.numel() for p in build_model("resnet50", 100).parameters())
    assert two["prediction"]["bytes_sent_root"] == pytest.approx(nbytes, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "batch", "scaling", "limit", "note"),
    [
        ("--parameters 12775000", "--batch 8 --batch-size 4", "strong", 4, "batch of 8: each"),
        ("--parameters 12775000", "--batch 1", "weak", 1, ""),
        ("--model resnet18_transfer", "--batch 8 --batch-size 4", "strong", 4, "batch of 8: each"),
        ("--model resnet50", "--batch 8 --batch-size 4", "strong", 2, "batch of 16: BatchNorm"),
        ("--model resnet50", "--batch 1", "weak", 1, ""),
        ("--model resnet50", "--batch 1 --batch-size 4", "strong", 4, "batch of 8: each"),
        ("", "--batch 1", "weak", 1, ""),
    ],
)
def test_a_rank_needs_two_samples_for_batchnorm_and_one_without(
    capsys, model, batch, scaling, limit, note
):
    words = f"{model} {batch} --scaling {scaling} --step-time 100ms --sync ring --json --nodes 4 8"
    assert predict(*words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    strong, _ = printed["scaling"]
    assert strong["limit"] == limit
    four, eight = printed["rows"]
    assert note in eight["note"]
    assert bool(note) == bool(eight["note"])
    computed = [
        row["prediction"]["compute_seconds"] / NCCL.values.straggling(row["nodes"])
        for row in (four, eight)
    ]
    assert computed[0] == pytest.approx(computed[1])  # as few samples as a rank can have
    if scaling == "weak":
        assert computed[0] == pytest.approx(0.1)


ROWS, COLUMNS, MATRICES = 505, 506, 50  # that stand for 12,775,000 parameters
ENTRIES = ROWS * COLUMNS * MATRICES
ALPHA, BETA = 2e-4, 8 * HEADERS / 1e9  # seconds of a message and of a byte on links of 1 Gbit/s


def own_steps(names, *, nodes=8, itemsize=4, accumulation_steps=1, model=None, mb=None, **changes):
    """Return the rows of a step of 100 ms for 8 samples; ``model``: of the calibration.

    Without a cluster messages cost nothing but their links.
    """
    calibration = with_own_model(
        replace(REFERENCE, network=Network(0.0, 0.0)),
        model=model,
        parameters=None if model else 12.775e6,
        step_seconds=0.1,
        batch=8,
    )
    own = scenario(
        calibration=with_gradient_bytes(calibration, itemsize),
        **{"batch_size": 8 * accumulation_steps, "scaling": "weak", "own_nodes": True} | changes,
        accumulation_steps=accumulation_steps,
    )
    plans = message_plans(names, {"accumulation_steps": accumulation_steps, "bucket_mb": mb})
    return {row.sync: row for row in predict_table([nodes], plans, own)}


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_types_of_gradients_and_accumulation_by_hand(itemsize, accumulation_steps):
    names = "none ring fsdp sharded ddp ddp_fp16 topk ddp_powersgd local_sgd".split()
    rows = own_steps(names, itemsize=itemsize, accumulation_steps=accumulation_steps)
    step = {name: row.prediction for name, row in rows.items()}
    sent = {name: row.prediction.bytes_sent_root for name, row in rows.items()}
    measured = REFERENCE.compute.at(LARGE_STEP)
    update = 0.1 * measured.update_seconds / measured.seconds
    alone = accumulation_steps * (0.1 - update) + update
    assert step["none"].step_seconds == pytest.approx(alone)
    whole = ENTRIES * itemsize
    ring = 2 * 7 * ALPHA + 2 * 7 / 8 * whole * BETA
    assert step["ring"].step_seconds == pytest.approx(alone + ring, rel=1e-4)
    assert step["local_sgd"].sync_seconds == pytest.approx(ring / 4)
    assert sent["ring"] == pytest.approx(2 * 7 / 8 * whole, rel=1e-4)
    part = math.ceil(ROWS / 8) * COLUMNS * itemsize
    hops = MATRICES * 14 * (accumulation_steps + 1)  # gathers in each pass, reduces in the last
    assert step["fsdp"].sync_seconds == pytest.approx(hops * (ALPHA + part * BETA))
    assert sent["fsdp"] == hops * part
    # 2 bytes an entry, whatever the gradients have
    assert sent["ddp_fp16"] == pytest.approx(2 * 7 / 8 * ENTRIES * 2, rel=1e-4)
    assert (step["ddp_fp16"] == step["ddp"]) == (itemsize == 2)
    assert sent["topk"] == 7 * math.ceil(0.01 * ENTRIES) * (itemsize + 4)
    thin = MATRICES * 2 * (ROWS + COLUMNS) * itemsize  # P and Q of two columns each
    assert sent["ddp_powersgd"] == pytest.approx(2 * 7 / 8 * thin)


@pytest.mark.parametrize("model", [None, "vgg11"])
def test_half_of_the_bytes_on_half_of_the_rate_take_the_same_time(model):
    """Also where backward hides them: the gradients are ready at the same moments."""
    names = "all_reduce ring ddp ddp_zero1 overlapped sharded fsdp local_sgd".split()
    whole = own_steps(names, model=model, itemsize=4, mb=8.0, rate_bits=2e9)
    half = own_steps(names, model=model, itemsize=2, mb=4.0, rate_bits=1e9)
    for name in names:
        seconds = whole[name].prediction.step_seconds
        assert half[name].prediction.step_seconds == pytest.approx(seconds, rel=1e-4)


def test_micro_batches_share_the_batch_and_hide_no_more_than_one():
    """Strong scaling divides the batch over ranks and micro-batches; weak over micro-batches."""
    names = ["ddp", "sharded"]
    one = own_steps(names)
    four = own_steps(names, accumulation_steps=4)
    strong = own_steps(names, accumulation_steps=4, scaling="strong", batch_size=256)  # 8 x 4 x 8
    alone = own_steps(names, accumulation_steps=4, nodes=1)
    for name in names:
        exposed = four[name].prediction.sync_seconds
        assert exposed == pytest.approx(one[name].prediction.sync_seconds)
        assert strong[name].prediction == four[name].prediction
        seconds = four[name].prediction.step_seconds
        assert four[name].speedup == pytest.approx(
            8 * alone[name].prediction.step_seconds / seconds
        )
        assert four[name].efficiency == four[name].speedup / 8 > one[name].efficiency
    calibrated = table([8, 64], ["ring"], accumulation_steps=4)
    step = REFERENCE.compute.at(256 / (8 * 4))
    computed = 4 * (step.before_seconds + step.backward_seconds) + step.update_seconds
    assert calibrated["ring", 8].prediction.compute_seconds == pytest.approx(computed)
    assert "global batch of 512: BatchNorm needs 2" in calibrated["ring", 64].note


def test_type_and_accumulation_are_said_unless_they_are_the_default(capsys):
    words = "--parameters 12775000 --step-time 100ms --batch 8 --sync ring --json"
    extra = "--gradient-type bf16 --accumulation-steps 4"
    printed = []
    for flags in ("--gradient-type fp32 --accumulation-steps 1", extra):
        assert predict(*words.split(), *flags.split()) == 0
        printed.append(json.loads(capsys.readouterr().out))
    plain, other = printed
    assert plain.keys() | {"gradient_type", "accumulation_steps"} == other.keys() != plain.keys()
    assert (other["gradient_type"], other["accumulation_steps"]) == ("bf16", 4)
    assert plain["about"][1].endswith("MB of gradients, batch of a node 8")
    assert "25.6 MB of gradients in bf16, batch of a node 32 in 4" in other["about"][1]
    typical = {"cluster": NCCL, "step_seconds": 0.1, "step_samples": 8}
    [expected] = own_steps(["ring"], itemsize=2, accumulation_steps=4, **typical).values()
    assert other["rows"][0]["prediction"] == asdict(expected.prediction)
    limits = {limit["scaling"]: limit["limit"] for limit in other["scaling"]}
    assert limits == {"strong": 8, "weak": 100_000}


def rows_of(printed):
    return {row["sync"]: row for row in json.loads(printed)["rows"]}


def test_synchronised_batchnorm_waits_for_16_messages_a_step(capsys):
    names = ["none", "all_reduce_flat", "ddp", "sharded", "local_sgd"]
    both = []
    for setting in ("off", "on"):
        assert predict("--json", "--sync", *names, "--sync-batchnorm", setting) == 0
        both.append(rows_of(capsys.readouterr().out))
    off, on = both
    assert off["none"] == on["none"]
    # A ring of 8 ranks: each message travels 14 times, an eighth of its bytes at a time.
    channels = 64 + 128 + 2 * 256 + 4 * 512
    nbytes = 8 * (2 * channels + 8) + 4 * 2 * channels
    seconds = 16 * 14 * 2e-4 + 14 / 8 * nbytes * 8 * HEADERS / 1e9
    for name in names[1:]:
        plain, waiting = off[name]["prediction"], on[name]["prediction"]
        assert plain["batchnorm_seconds"] == 0
        assert waiting["batchnorm_seconds"] == pytest.approx(seconds, rel=0.01)
        sent = waiting["bytes_sent_others"] - plain["bytes_sent_others"]
        assert sent == pytest.approx(14 / 8 * nbytes)
        more = waiting["step_seconds"] - plain["step_seconds"]
        if name in ("all_reduce_flat", "local_sgd"):  # nothing else is under way meanwhile
            assert more == pytest.approx(seconds, rel=0.01)
        else:
            assert 0 < more < seconds
        assert waiting["sync_seconds"] >= waiting["batchnorm_seconds"]
    assert predict("--sync", "ddp", "--sync-batchnorm", "on") == 0
    text = capsys.readouterr().out
    assert "SyncBatchNorm: 8 layers, 16 messages a step" in text
    assert "8 nodes: SyncBatchNorm's messages take 45.8 ms" in text


def test_a_calibration_without_batchnorm_layers_is_to_be_made_again(capsys, tmp_path):
    path = tmp_path / "old.json"
    content = json.loads(reference_path().read_text())
    del content["batchnorm"]
    path.write_text(json.dumps(content))
    command = ["predict", "--calibration", str(path), "--rate", "1gbit"]
    assert main([*command, "--sync", "ring"]) == 0
    capsys.readouterr()
    assert main([*command, "--sync-batchnorm", "on"]) == 2
    assert "lab calibrate again" in capsys.readouterr().err


def test_ranks_of_a_node_share_its_link_and_its_cores(capsys):
    """Four nodes of two ranks: hierarchical sends as four ranks do, and a little inside."""
    names = ["all_reduce_flat", "halving_doubling", "hierarchical"]
    flags = ["--nodes", 4, "--sync", *names]
    assert predict(*flags, "--json", "--ranks-per-node", 2) == 0
    shared = rows_of(capsys.readouterr().out)
    assert {(row["nodes"], row["ranks_per_node"]) for row in shared.values()} == {(4, 2)}
    payload, link = sum(REFERENCE.gradient_sizes), 8 * HEADERS / 1e9
    for name, payloads in zip(names, (2 * 7 / 8, 3, 2 * 3 / 4), strict=True):
        seconds = shared[name]["prediction"]["sync_seconds"]
        assert seconds == pytest.approx(payloads * payload * link, rel=0.12), name
    # The ranks of a node compute as two ranks of the calibrated machine do.
    here = table([8], ["ring"], **HERE)["ring", 8].prediction.compute_seconds
    apart = table([8], ["ring"])["ring", 8].prediction.compute_seconds
    assert apart < shared["hierarchical"]["prediction"]["compute_seconds"] < here
    slower = ["--rate-inside", "100mbit", "--json", "--ranks-per-node", 2]
    assert predict(*flags, *slower) == 0
    inside = rows_of(capsys.readouterr().out)["hierarchical"]["prediction"]["sync_seconds"]
    # a reduce of 1 + 1/2 payloads in a row, and a broadcast
    more = (1.5 / 1.5 + 1) * payload * 8 * HEADERS / 1e8
    between = shared["hierarchical"]["prediction"]["sync_seconds"]
    assert inside == pytest.approx(between + more, rel=0.05)

    assert predict("--nodes", 1, 4, "--sync", *names, "--ranks-per-node", 2) == 0
    text = capsys.readouterr().out
    assert "2 ranks on each node share its link and its cores" in text
    assert "as calibrated over loopback" in text
    assert {"1 x 2", "4 x 2"} <= set(re.findall(r"\d+ x \d", text))
    assert "at least 2 a rank, so up to 64 nodes." in text
    assert predict("--ranks-per-node", 2, links="") == 2
    assert "Add --rate" in capsys.readouterr().err


def test_ranks_with_processors_of_their_own_compute_alone_and_meet_at_a_typical_rate(capsys):
    own = "--step-time 120ms --batch 64 --ranks-per-node 4 --sync none hierarchical ddp".split()
    assert predict(*own, "--json", links="--rate 1gbit") == 0
    rows = rows_of(capsys.readouterr().out)
    loss = NCCL.values.node_loss
    assert rows["none"]["prediction"]["step_seconds"] == pytest.approx(0.12 * (1 + loss))
    assert rows["none"]["speedup"] == pytest.approx(8)
    assert predict(*own, links="--rate 1gbit") == 0
    text = capsys.readouterr().out
    latency = f"{1e6 * NCCL.values.message_seconds:.3g} µs"
    gbytes = f"{NCCL.values.inside_bits / 8e9:.3g} GB/s"
    assert f"inside a node: {latency} a message, {gbytes} (typical; --rate-inside" in text
    assert f"compute {100 * loss:.1f} % longer (typical; --node-step-time sets it)" in text
    assert "batch of a rank 64" in text
    assert predict(*own, "--node-step-time", "130ms", links="--rate 1gbit") == 0
    text = capsys.readouterr().out
    assert "messages inside a node are part of --node-step-time" in text
    assert "typical; --rate-inside" not in text


def test_one_rank_on_each_node_is_the_default(capsys):
    assert predict("--json") == 0
    plain = capsys.readouterr().out
    assert predict("--json", "--ranks-per-node", 1, "--sync-batchnorm", "off") == 0
    assert capsys.readouterr().out == plain


WITHOUT_TORCH = """
import sys
from lab.cli import main
flags = ["--ranks-per-node", "2", "--sync-batchnorm", "on"]
assert main(["predict", "--json", "--rate", "1gbit", *flags]) == 0
assert "torch" not in sys.modules
"""


def test_predictions_need_no_torch_and_their_plans_are_those_of_the_strategies():
    command = [sys.executable, "-c", WITHOUT_TORCH]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout
    assert len(json.loads(out)["rows"]) == 4 * len(STRATEGIES)
    for name, plan in message_plans(list(STRATEGIES)).items():
        own = build_sync(name).plan
        assert (type(own), vars(own)) == (type(plan), vars(plan)), name
