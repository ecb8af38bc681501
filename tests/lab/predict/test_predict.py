"""``lab predict``: its numbers, its text, what it refuses, and that it does not need torch."""

import argparse
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from matplotlib.image import imread
from rich.console import Console

from common.errors import UserError
from common.sync import STRATEGIES, build_sync
from common.sync.message_cost import GradientSize
from common.sync.message_plans import MessagePlan
from lab.predict.bucket_choice import SIZES_MB
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.cli import main_predict
from lab.predict.tables import message_plans, predict_table, scaling_limits_of
from lab.units import parse_latency, parse_rate
from tests.helpers import ROOT

REFERENCE = load_calibration(reference_path())


def table(nodes, strategies, **changes):
    settings = {
        "rate_bits": 1e9,
        "latency_seconds": 2e-4,
        "batch_size": 256,
        "scaling": "strong",
    } | changes
    return {
        (row.sync, row.nodes): row
        for row in predict_table(
            nodes,
            plans=message_plans(strategies),
            calibration=settings.pop("calibration", REFERENCE),
            **settings,
        )
    }


def arguments(**changes):
    return argparse.Namespace(
        **{
            "nodes": [8],
            "sync": ["all"],
            "rate": "1gbit",
            "latency": "0.2ms",
            "batch_size": 256,
            "scaling": "strong",
            "calibration": reference_path(),
            "json": True,
            "figure": None,
        }
        | changes
    )


def test_speedup_and_efficiency_are_those_of_the_step_times():
    strong = table([1, 8], ["ring"])
    one, eight = strong["ring", 1], strong["ring", 8]
    assert (one.speedup, one.efficiency, one.prediction.sync_seconds) == pytest.approx((1, 1, 0))
    assert eight.speedup == pytest.approx(
        one.prediction.step_seconds / eight.prediction.step_seconds
    )
    assert eight.efficiency == pytest.approx(eight.speedup / 8)
    weak = table([8], ["ring"], scaling="weak")["ring", 8]
    assert weak.prediction.compute_seconds == pytest.approx(one.prediction.compute_seconds)
    assert weak.speedup == pytest.approx(
        8 * one.prediction.step_seconds / weak.prediction.step_seconds
    )


def test_auto_is_the_best_size_of_buckets_for_each_number_of_nodes():
    sizes = [f"ddp-{size:g}" for size in SIZES_MB]
    rows = table([1, 4, 64], ["ddp", "ddp-auto", *sizes])
    for nodes in (1, 4, 64):
        step = {
            name: rows[name, nodes].prediction.step_seconds for name in ("ddp", "ddp-auto", *sizes)
        }
        best = min(step.values())
        expected = best if best < 0.99 * step["ddp"] else step["ddp"]
        assert step["ddp-auto"] == expected
        assert (step["ddp-auto"] < step["ddp"]) == (nodes > 1)
    by_flag = message_plans(["ddp", "ring"], {"bucket_mb": "auto"})
    limits = scaling_limits_of(by_flag, REFERENCE, 1e9, 2e-4, 256)
    assert [one.sync for one in limits] == ["ddp", "ring"] * 2
    default = scaling_limits_of(message_plans(["ddp"]), REFERENCE, 1e9, 2e-4, 256)
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
    here = {"rate_bits": None, "latency_seconds": None}
    assert table([2], ["ring"], **here)["ring", 2].note == ""
    assert "share" in table([16], ["ring"], **here)["ring", 16].note


def test_ranks_of_one_machine_share_its_cores():
    here = table([1, 2], ["ring"], rate_bits=None, latency_seconds=None)
    apart = table([1, 2], ["ring"], rate_bits=1e12, latency_seconds=None)
    assert here["ring", 1].prediction.compute_seconds == apart["ring", 1].prediction.compute_seconds
    assert (
        here["ring", 2].prediction.compute_seconds
        > 1.3 * apart["ring", 2].prediction.compute_seconds
    )


def test_a_strategy_without_a_formula_is_shown_as_such(capsys):
    row = predict_table([2], 1e9, None, {"silent": MessagePlan()}, 256, "strong", REFERENCE)[0]
    assert (row.prediction, row.note) == (None, "no formula")


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
    ],
)
def test_rates_and_latencies_are_read(parse, text, value):
    assert parse(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": "0gbit"}, "more than 0"),
        ({"rate": "fast"}, "200mbit"),
        ({"rate": "10"}, "10gbit"),
        ({"rate": "1ms"}, "1gbit"),
        ({"latency": "0.2"}, "0.2ms"),
        ({"latency": "-1ms"}, "0.2ms"),
        ({"latency": "1gbit"}, "0.2ms"),
        ({"nodes": [0]}, "100,000"),
        ({"nodes": [4, 100_001]}, "100001"),
        ({"sync": ["carrier_pigeon"]}, "halving_doubling"),
        ({"scaling": "up"}, "weak"),
        ({"batch_size": 1}, "--batch-size"),
        ({"bucket_mb": "fast"}, "--bucket-mb: got 'fast', give a number above 0, or auto"),
        ({"bucket_mb": "0"}, "got '0', give a number above 0, or auto"),
    ],
)
def test_bad_input_is_named_with_what_to_do(changes, said):
    with pytest.raises(UserError, match=said):
        main_predict(arguments(**changes))


def test_the_table_says_where_its_numbers_come_from(capsys):
    assert main_predict(arguments(json=False, nodes=[1, 8])) == 0
    out = capsys.readouterr().out
    assert REFERENCE.name in out.splitlines()[0]
    assert all(name in out for name in STRATEGIES)
    assert "links of 1,000 Mbit/s (6% headers); all_reduce: 200 µs a message, 118 MB/s" in out
    assert "NOT" not in out


def test_json_holds_the_rows_and_how_far_each_strategy_scales_strongly_and_weakly(capsys):
    assert main_predict(arguments(nodes=[1, 8])) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == 2 * len(STRATEGIES)
    limits = {(limit["sync"], limit["scaling"]): limit for limit in printed["scaling"]}
    assert set(limits) == {(name, scaling) for name in STRATEGIES for scaling in ("strong", "weak")}
    assert limits["none", "weak"]["nodes"] is None
    assert limits["none", "strong"]["limit"] == 128  # at least two samples a node
    assert limits["gather_scatter", "strong"]["nodes"] == 1
    assert limits["gather_scatter", "weak"]["held_by"] == "root's link"
    assert limits["ring", "weak"]["held_by"] == "latency"
    rows = table([limits["ring", "weak"]["nodes"]], ["ring"], scaling="weak")
    assert limits["ring", "weak"]["speedup"] == pytest.approx(next(iter(rows.values())).speedup)


def test_the_second_table_says_where_each_strategy_stops(capsys):
    assert main_predict(arguments(json=False, sync=["none", "ring", "gather_scatter"])) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (
        [line for line in lines if line.split()[:1] == [name]]
        for name in ("none", "gather_scatter")
    )
    assert first[1].split()[1:] == ["128", "19.4", "samples", "all", "never", "100,000", "-"]
    assert second[1].split()[1:] == [
        "1",
        "1.00",
        "root's",
        "link",
        "2",
        "11",
        "1.84",
        "root's",
        "link",
    ]
    assert any("so up to 128 nodes." in line for line in lines)


def test_ranks_of_one_machine_end_with_its_cores(capsys):
    assert main_predict(arguments(json=False, rate=None, latency=None)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("share its 2 cores. Give --rate to predict separate machines")
    assert main_predict(arguments(rate=None, latency=None)) == 0
    assert json.loads(capsys.readouterr().out)["scaling"] == []


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_terminal_of_80_columns_cuts_nothing(scaling, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        "lab.predict.printing.Console",
        partial(Console, file=written, force_terminal=True, width=80),
    )
    assert main_predict(arguments(json=False, nodes=[1, 100_000], scaling=scaling)) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())
    assert "…" not in text
    tables = [
        line for line in text.splitlines() if line.split()[:1] and line.split()[0] in STRATEGIES
    ]
    assert len(tables) == 3 * len(STRATEGIES)
    assert max(map(len, tables)) <= 80


def test_the_figure_has_a_line_for_each_strategy(tmp_path):
    assert main_predict(arguments(scaling="weak", figure=tmp_path / "steps.svg")) == 0
    texts = re.findall(
        r"<text[^>]*>([^<]+)</text>", (tmp_path / "steps.svg").read_text(encoding="utf-8")
    )
    names = [name for text in texts for name in text.split(", ") if name in STRATEGIES]
    # one label beside each of the two panels
    assert sorted(names) == sorted([*STRATEGIES, *STRATEGIES])
    # two strategies whose lines coincide share a label
    assert "gather_scatter, gather_scatter_flat" in texts
    assert {"100,000", "seconds a step", "efficiency", "Weak scaling, predicted"} <= set(texts)
    assert any(REFERENCE.name in text for text in texts)
    assert main_predict(arguments(sync=["ring"], figure=tmp_path / "steps.PNG")) == 0
    assert len(imread(tmp_path / "steps.PNG", format="png")) > 600


@pytest.mark.parametrize(
    ("name", "said"),
    [("steps.gif", "ends in .png"), ("missing/steps.png", "a folder that exists")],
)
def test_a_figure_that_cannot_be_drawn_is_named(name, said, tmp_path):
    with pytest.raises(UserError, match=said):
        main_predict(arguments(sync=["ring"], figure=tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_the_reference_says_that_it_is_not_this_machine(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "lab.predict.calibration_file.calibration_path", lambda: tmp_path / "none.json"
    )
    main_predict(arguments(json=False, calibration=None))
    assert capsys.readouterr().out.startswith("NOT this machine")


PROBE = """
import json, sys, time
from lab.predict.tables import message_plans
from common.sync import STRATEGIES
from common.sync.message_cost import GradientSize
from common.sync.message_plans import MessagePlan
sizes = [GradientSize(shape, itemsize) for shape, itemsize in json.loads(sys.argv[1])]
print(json.dumps([
    [name, ranks, [list(vars(one).values()) for one in plan.operations(sizes, ranks)],
     plan.period, [str(plan.bytes_sent(sizes, rank, ranks)) for rank in range(min(ranks, 9))]]
    for name, plan in message_plans(list(STRATEGIES)).items() for ranks in (2, 5, 64, 100_000)]))
assert "torch" not in sys.modules
from common.sync import build_sync
build_sync("ring").prepare
import torch
assert torch.zeros(2).sum() == 0
"""


def test_plans_without_torch_are_those_with_torch():
    sizes = [
        GradientSize((64, 3, 3, 3)),
        GradientSize((512, 512, 3, 3)),
        GradientSize((7,)),
        GradientSize((10, 33), 2),
    ]
    found = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([[size.shape, size.itemsize] for size in sizes])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    without = json.loads(found.stdout)
    assert len(without) == 4 * len(STRATEGIES)
    for name, ranks, operations, period, sent in without:
        plan = build_sync(name).plan
        assert operations == [list(vars(one).values()) for one in plan.operations(sizes, ranks)], (
            name
        )
        assert period == plan.period
        assert sent == [
            str(plan.bytes_sent(sizes, rank, ranks)) for rank in range(min(ranks, 9))
        ], name


def test_calibrations_over_nodes_keep_a_machine_a_rank():
    nodes = replace(REFERENCE, ranks=4, ranks_here=1)
    rows = table([1, 8], ["ring"], rate_bits=None, latency_seconds=None, calibration=nodes)
    assert rows["ring", 8].note == ""
    assert (
        rows["ring", 8].prediction.compute_seconds < rows["ring", 1].prediction.compute_seconds / 2
    )
