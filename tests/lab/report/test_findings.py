"""The findings of a report: each with numbers that make it true and numbers that make it false.

A row of ``CASES`` has a phrase, the change that makes it true, and the change that makes it false.
A change gives new values by their place in the results of none, ring and ddp on two nodes; a
strategy's name stands for its cell, and what follows "repeats" is set in each of them.
"""

from pathlib import Path

import pytest

from lab.predict.readable import bandwidth_text, duration_text
from lab.report.findings import findings
from lab.report.view import blocks, small_text
from tests.helpers.report_samples import cell, predicted, results, timeline

GOLDEN = Path(__file__).with_name("findings.txt")
SAME = {}


def texts(data):
    (block,) = blocks(data)
    return [finding.text for finding in findings(block)]


def changed(change):
    """Return the results of none, ring and ddp with these values."""
    data = results(("ring", "ddp"), (1, 2), predict=False)
    data["timelines"] = {}
    named = {entry["sync"]: entry for entry in data["cells"]}
    for place, value in change.items():
        *names, last = place.split(".")
        targets = [data if names[0] in data else named] if names else [named]
        for name in names:
            targets = [target[name] for target in targets]
            if isinstance(targets[0], list):
                targets = [each for target in targets for each in target]
        for target in targets:
            target[last] = value
    errors = named.pop("errors", {})
    changes = named.pop("rank_1_sends_more", 0)
    if errors:
        cells = {f"{sync}-n2": predicted(named[sync], error) for sync, error in errors.items()}
        cells["ring-n2"]["bytes_sent"][1] += changes
        data["prediction"] = {"made": "2026-11-21T12:00:00", "cells": cells}
    data["timelines"] |= named.pop("recorded", {})
    data["emulated"] = named.pop("emulated", False)
    data["cells"] = list(named.values())
    return data


def wrong(by=0.01):
    return {"ring": cell("ring", 2, loss_shift=by)}


def started(at, ddp="2026-11-21T13:00:00"):
    rest = {"none.repeats.started": "2026-11-21T13:00:00", "ddp.repeats.started": ddp}
    return {"errors": {"ring": 0.1}, "ring.repeats.started": f"2026-11-21T{at}"} | rest


def recorded(overlapped):
    return {"recorded": {"ring-n2": timeline("ring", 2, overlapped=overlapped)}}


def sends(root, others=1e6):
    return {"ring.median.root_bytes_sent": root, "ring.median.others_bytes_sent": others}


def step(sync, seconds, *interval):
    return {f"{sync}.median.step": seconds, f"{sync}.interval.step": list(interval)}


def accuracy(value, **settings):
    more = {f"settings.{name}": setting for name, setting in settings.items()}
    return {"ring.repeats.test_accuracy": value} | more


def reached(seconds, until=0.6):
    return {"ring.repeats.seconds_to_accuracy": seconds, "settings.until_accuracy": until}


# ring takes 0.559 s and ddp 0.514 s, each ± 2 %; one node takes 1.0 s
SLOW, UNSURE = step("ring", 2.0, 1.9, 2.1), step("ring", 1.01, 0.9, 1.1)
NEAR = step("ddp", 0.55, 0.53, 0.56)
WAITS = {"ring.median.wait": 0.2, "ring.median.wire": 0.1}
NO_TIMES = {f"{sync}.median.{part}": None for sync in ("ring", "ddp") for part in ("wait", "wire")}
CASES = (
    ("On 2 nodes ring is not equal to ddp, PyTorch's own, from step 2 on", wrong(), wrong(1e-6)),
    ("On 2 nodes ring and ddp compute the same", SAME, wrong()),
    ("a literal 2 is right by chance", SAME, wrong()),
    ("not comparable: the seeds differ (0 and 7)", {"ring.repeats.seed": 7}, SAME),
    (
        "the ranks of ring ended with different weights",
        {"ring.repeats.equal_weights": False},
        {"ring.repeats.equal_weights": True},
    ),
    ("ddp is fastest: 0.514 s a step, 1.09 times as fast as ring.", SAME, NEAR),
    ("ddp and ring cannot be told apart (0.550 to 0.559 s; their 95 % intervals", NEAR, SLOW),
    ("not every strategy ran more than once", step("ring", 0.6, None, None), SAME),
    ("each strategy ran once", step("ring", 1, None, None) | step("ddp", 1, None, None), SAME),
    (
        "of the exact strategies ddp takes",
        {"ring.exact": False} | step("ring", 0.1, 0.1, 0.1),
        SAME,
    ),
    ("ddp takes 0.514 s a step", {"ring.status": "failed", "ring.median": None}, SAME),
    ("ddp takes 0.514 s a step", wrong() | step("ring", 0.1, 0.1, 0.1), SAME),  # takes no part
    ("ring is slower than one node, even at the favourable ends of both", SLOW, UNSURE),
    ("ring is slower than one node by the medians, but the 95 % intervals", UNSURE, SAME),
    ("by the medians; without intervals (one repeat)", step("ring", 2, None, None), SLOW),
    # an interval that reaches zero leaves the speed-up open
    ("ring is slower than one node by the medians, but", step("ring", 2.0, 0.0, 5.0), SLOW),
    ("ring is processing fewer samples", SLOW | {"settings.scaling": "weak"}, SLOW),
    (
        "the efficiency is above the ideal 100 % (ring 135 %). The run on one node was disturbed",
        {"ring.median.step": 1 / 2.7},
        {"ring.median.step": 1 / 2.02},
    ),
    ("on the wire with ring", {"ring.median.wire": 1.0}, {"ring.median.wire": 0.1}),
    ("waiting for slower ranks with ring", {"ring.median.wait": 1.0}, WAITS),
    (
        "ring: ranks wait longer for slower ranks than sending takes. A faster network",
        WAITS | {"ring.interval.wait": [0.19, 0.21]},
        WAITS | {"ring.interval.wait": [0.05, 0.35]},
    ),
    ("takes, but the 95 % intervals overlap", WAITS | {"ring.interval.wait": [0.05, 0.35]}, SAME),
    ("no strategy waits longer", SAME, NO_TIMES),
    ("the largest part of the median step", SAME, NO_TIMES),
    ("overlaps backward with ring (88 % of its time)", recorded(True), recorded(False)),
    ("ring sends nothing during backward", recorded(False), recorded(True)),
    ("rank 0 sends more than its share with ring: up to 75.0 %", sends(3e6), sends(1.1e6)),
    ("about its share with any strategy: up to 50.0 %", SAME, sends(None)),
    ("the bytes of ring were not counted", sends(None), SAME),
    ("ring is near chance (at most 15.0 % with 10 classes)", accuracy(0.13), accuracy(0.17)),
    ("the test accuracy of ring is 17.0 %", accuracy(0.17), accuracy(0.13)),
    (
        "the number of classes is unknown",
        accuracy(0.5, dataset="folder"),
        accuracy(0.5, dataset="folder", num_classes=3),
    ),
    (
        "ring, which does not claim to be exact, reaches 40.0 %; the exact strategies 43.0 %",
        accuracy(0.4) | {"ring.exact": False, "ddp.repeats.test_accuracy": 0.43},
        accuracy(0.4) | {"ddp.repeats.test_accuracy": 0.43},
    ),
    ("ring reached 60 % after 3.0 s of training (3.0 to 3.0 s over", reached(3.0), reached(None)),
    ("ring did not reach 60 % in any of 3 runs", reached(None), reached(3.0)),
    (
        "2 of 2 predictions in scope lie within 20 %",
        {"errors": {"ring": 0.19, "ddp": -0.19}},
        {"errors": {"ring": 0.21, "ddp": -0.19}},
    ),
    (
        "Outside are ring on 2 nodes: +21.0 %",
        {"errors": {"ring": 0.21}},
        {"errors": {"ring": 0.19}},
    ),
    ("made before the first run started", started("12:00:05"), started("11:59:00")),
    # without a start, a run may have been the first
    ("made before the first run", started("12:00:05"), started("12:00:05", ddp=None)),
    (
        "made after the first run had started (2026-11-21 11:59:00, then 2026-11-21 12:00:00)",
        started("11:59:00"),
        started("12:00:05"),
    ),
    (
        "Every rank sent as many bytes as the formulas say",
        {"errors": {"ring": 0.1}},
        {"errors": {"ring": 0.1}, "rank_1_sends_more": 4},
    ),
    (
        "The counted bytes differ from the formulas with ring on 2 nodes",
        {"errors": {"ring": 0.1}, "rank_1_sends_more": 4},
        {"errors": {"ring": 0.1}},
    ),
    ("Failed and left out of every comparison: ring on 2", {"ring.status": "failed"}, SAME),
    ("Not run yet: ring on 2 nodes", {"ring.status": "pending"}, SAME),
    ("Only partly done", {"ring.status": "partial"}, SAME),
    (
        "Compute is EMULATED",
        {"emulated": True, "settings.compute": "laptop"},
        {"emulated": True, "settings.compute": "real"},
    ),
    (
        "The repeats of ring on 2 nodes differ so much",
        {"ring.interval.step": [0.3, 0.8]},
        {"ring.interval.step": [0.4, 0.6]},
    ),
    ("On 2 nodes the ranks share cores", {"ring.oversubscribed": True}, SAME),
)


@pytest.mark.parametrize(("phrase", "true", "false"), CASES, ids=[case[0] for case in CASES])
def test_a_finding_appears_with_its_numbers_only(phrase, true, false):
    assert phrase in " ".join(texts(changed(true)))
    assert phrase not in " ".join(texts(changed(false)))


def test_all_findings_of_a_comparison():
    """The sentences with their numbers, as the page has them; on several numbers of nodes once."""
    data = results(("gather_scatter", "ring", "ddp", "ddp_fp16"), accuracy=0.43)
    (block,) = blocks(data)
    said = "".join(
        f"{'- ' if one.caution else ''}{one.topic}: {one.text}\n    {one.evidence}\n"
        for one in findings(block)
    )
    assert said == GOLDEN.read_text(encoding="utf-8")


def test_nothing_is_said_of_nothing():
    data = changed({"ring.status": "pending", "ring.median": None})
    data["cells"] = data["cells"][1:2]
    assert texts(data) == [
        "No run has ended yet, so there is nothing to report.",
        "Not run yet: ring on 2 nodes.",
    ]


def test_times_to_accuracy_of_several_runs():
    data = changed({"settings.until_accuracy": 0.6})
    runs = zip(data["cells"][1]["repeats"], (12.0, 10.5, None), strict=True)
    for repeat, seconds in runs:
        repeat["seconds_to_accuracy"] = seconds
    said = " ".join(texts(data))
    assert "after 11.2 s of training (10.5 to 12.0 s over 2 runs); 1 of 3 runs did not" in said
    assert "a run did not reach 60 % in any of 3 runs" in said  # of one node


def test_weak_scaling_compares_samples_per_second():
    data = results(("ring",), (1, 2), scaling="weak")  # 512 samples in 1.059 s, 256 in 1.0 s
    ring = blocks(data)[0].find("ring", 2)
    assert (ring.speedup, ring.efficiency) == pytest.approx((2 / 1.059, 1 / 1.059))


def test_numbers_have_units_that_people_read():
    assert [bandwidth_text(value) for value in (8.07e-10, 8e-8, 0.0)] == [
        *("1.24 GB/s", "12.5 MB/s", "unlimited")
    ]
    seconds = {1.23e-5: "12.3 µs", 0.5634: "563 ms", 0.9999: "1 s", 9e-10: "0.9 ns"}
    seconds |= {7200: "2 h", 1234: "1,230 s", 0: "0 s"}
    assert {value: duration_text(value) for value in seconds} == seconds
    assert [small_text(value) for value in (2.61e-5, 0.0171, 3.2)] == ["2.6e-5", "0.017", "3.2"]
