"""The findings of a report: each with numbers that make it true and numbers that make it false.

A row of ``CASES`` has a phrase and the change that makes it true. What makes it false is another
change, or none. A change gives new values by their place in the results of none, ring and ddp on
two nodes; a strategy's name stands for its cell, and what follows "repeats" is set in each.
"""

from pathlib import Path

import pytest

from lab.comparison.record import Prediction
from lab.report.findings import findings
from lab.report.view import blocks, small_text
from tests.helpers.report_samples import cell, predicted, results, set_times

GOLDEN = Path(__file__).with_name("findings.txt")
SAME = {}


def texts(data):
    (block,) = blocks(data)
    return [finding.text for finding in findings(block)]


def changed(change):
    """Return the results of none, ring and ddp with these values."""
    data = results(("ring", "ddp"), (1, 2), predict=False)
    named = {entry.sync: entry for entry in data.cells}
    found = dict(change)
    errors = found.pop("errors", {})
    more_bytes = found.pop("more_bytes", 0)
    for place, value in found.items():
        first, *names = place.split(".")
        if not names:
            named[first] = value
        elif names == ["times"]:
            set_times(named[first], *value)
        elif first == "settings":
            data.settings[names[0]] = value
        else:
            put(named[first], names, value)
    data.timelines = {}
    data.cells = [named[sync] for sync in ("none", "ring", "ddp")]
    if errors:
        cells = {f"{sync}-n2": predicted(named[sync], error) for sync, error in errors.items()}
        cells["ring-n2"].bytes_sent[1] += more_bytes
        data.prediction = Prediction(made="2026-11-21T12:00:00", cells=cells)
    return data


def put(target, names, value):
    """Set an attribute, or an entry, by its place; below a list in each of its members."""
    first, *rest = names
    if isinstance(target, list):
        for member in target:
            put(member, names, value)
    elif rest:
        put(getattr(target, first), rest, value)
    elif isinstance(target, dict):
        target[first] = value
    else:
        setattr(target, first, value)


def ring(repeats=None, settings=None, **values):
    """Return a change of ring's cell, of all its repeats, and of the settings."""
    change = {f"ring.{name}": value for name, value in values.items()}
    change |= {f"ring.repeats.{name}": value for name, value in (repeats or {}).items()}
    return change | {f"settings.{name}": value for name, value in (settings or {}).items()}


def wrong():
    return {"ring": cell("ring", 2, loss_shift=0.01)}


def errors(more_bytes=0, **by_sync):
    return {"errors": by_sync, "more_bytes": more_bytes}


def sends(root, others=1e6):
    return {"ring.medians.root_bytes_sent": root, "ring.medians.others_bytes_sent": others}


def step(sync, seconds, low=None, high=None):
    return {f"{sync}.times": (seconds, low, high)}


def waits(*interval):
    return {"ring.medians.wait": 0.2, "ring.medians.wire": 0.1, "ring.intervals.wait": interval}


def accuracy(value, **settings):
    return ring({"test_accuracy": value}, settings)


def reached(seconds, until=0.6):
    return ring({"seconds_to_accuracy": seconds}, {"until_accuracy": until})


# ring takes 0.559 s and ddp 0.514 s, each ± 2 %; one node takes 1.0 s
SLOW, UNSURE = step("ring", 2.0, 1.9, 2.1), step("ring", 1.01, 0.92, 1.1)
NEAR = step("ddp", 0.55, 0.53, 0.56)
FIRST = step("ring", 0.1, 0.1, 0.1)
NO_TIMES = {"ring.medians": None, "ddp.medians": None}
WEIGHTS = [ring({"equal_weights": equal}) for equal in (False, True)]
DDP_UNCHECKED = {"ddp.repeats.claim": None}
LOSSY = {"ring.exact": False, "ddp.repeats.test_accuracy": 0.43}
MEANS = {
    "none.repeats.mean_iteration_seconds": 1.1,
    "ring.repeats.mean_iteration_seconds": 0.615,
    "ddp.repeats.mean_iteration_seconds": 0.6,
}
UNPLANNED = {"ring.repeats.ranks.predicted_memory": None}
NO_INTERVALS = step("ring", 1, None, None) | step("ddp", 1, None, None)
CASES = (
    ("in step 1 the gradients are added up and never divided", wrong(), SAME),
    ("On 2 nodes with ring and ddp every rank's optimiser got the mean", SAME, wrong()),
    ("On 2 nodes with ddp every rank's optimiser got the mean", wrong(), SAME),
    ("a literal 2 is right by chance", SAME, ring({"claim": None}) | DDP_UNCHECKED),
    ("whether ring gives every rank the mean gradient was not checked", ring({"claim": None})),
    ("the ranks of ring ended with different weights", *WEIGHTS),
    ("ddp is fastest: 0.514 s a step, 1.09 times as fast as ring.", SAME, NEAR),
    ("ddp and ring cannot be told apart (0.550 to 0.559 s a step; their 95 % int", NEAR, SLOW),
    ("; the repeats of ring differ too much)", step("ring", 0.559, 0.0, 1)),
    ("not every strategy ran more than once", step("ring", 0.6, None, None)),
    ("each strategy ran once", NO_INTERVALS),
    ("of the exact strategies ddp takes", ring(exact=False) | FIRST),
    ("ddp takes 0.514 s a step", ring(status="failed", medians=None)),
    ("ddp takes 0.514 s a step", wrong() | FIRST),  # takes no part
    ("ring is slower than one node, even at the favourable ends of both", SLOW, UNSURE),
    ("ring is slower than one node by the medians, but the 95 % intervals", UNSURE),
    ("by the medians; without intervals (one repeat)", step("ring", 2, None, None), SLOW),
    # an interval that reaches zero leaves the speed-up open
    ("ring is slower than one node by the medians, but", step("ring", 2.0, 0.0, 5.0), SLOW),
    ("ring is processing fewer samples", SLOW | {"settings.scaling": "weak"}, SLOW),
    ("above the ideal 100 % (ring 135 %)", step("ring", 1 / 2.7), step("ring", 1 / 2.02)),
    ("not separated) with ring", {"ring.medians.wire": 1.0}, {"ring.medians.wire": 0.1}),
    ("waiting for slower ranks with ring", {"ring.medians.wait": 1.0}, waits(0.1, 0.3)),
    ("ring: ranks wait longer for slower ranks than", waits(0.19, 0.21)),
    ("than the exchange takes. A faster network", waits(0.19, 0.21), waits(0.05, 0.35)),
    ("takes, but the 95 % intervals overlap", waits(0.05, 0.35), waits(0.19, 0.21)),
    ("the largest part of a step", SAME, NO_TIMES),
    ("rank 0 sends more than its share with ring: up to 75.0 %", sends(3e6), sends(1.1e6)),
    ("By the plan, not counted: ring.", sends(None)),
    ("the bytes of ring were not counted, and no plan is known", sends(None) | UNPLANNED),
    ("ring is near chance (at most 15.0 % with 10 classes)", accuracy(0.13), accuracy(0.17)),
    ("the test accuracy of ring is 17.0 %", accuracy(0.17), accuracy(0.13)),
    ("classes is unknown", accuracy(0.5, dataset="x"), accuracy(0.5, dataset="x", num_classes=3)),
    ("exact, reaches 40.0 %; the exact strategies 43.0 %", accuracy(0.4) | LOSSY, accuracy(0.4)),
    ("ring reached 60 % after 3.0 s of training (3.0 to 3.0 s over", reached(3.0), reached(None)),
    ("ring did not reach 60 % in any of 3 runs", reached(None), reached(3.0)),
    ("2 of 2 predictions in scope", errors(ring=0.19, ddp=-0.19), errors(ring=0.21, ddp=-0.19)),
    ("Outside are ring on 2 nodes: +21.0 %", errors(ring=0.21), errors(ring=0.19)),
    ("Every rank sent as many bytes as the formulas say", errors(ring=0.1), errors(4, ring=0.1)),
    ("differ from the formulas with ring on 2 nodes", errors(4, ring=0.1), errors(ring=0.1)),
    ("Failed and left out of every comparison: ring on 2", ring(status="failed")),
    ("Not run yet: ring on 2 nodes", ring(status="pending")),
    ("Only partly done", ring(status="partial")),
    ("The repeats of ring on 2", step("ring", 0.559, 0.3, 0.8), step("ring", 0.559, 0.4, 0.6)),
    # one measure: the assignment's mean iteration, if every run has it
    ("ddp is fastest: 0.600 s an iteration, 1.03 times as fast as ring", MEANS, SAME),
    (
        "ddp is fastest: 0.514 s a step",
        MEANS | {"ring.repeats.mean_iteration_seconds": None},
        MEANS,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_finding_appears_with_its_numbers_only(case):
    phrase, true, *false = case
    assert phrase in " ".join(texts(changed(true)))
    assert phrase not in " ".join(texts(changed(*false or [SAME])))


def test_all_findings_of_a_comparison():
    """The sentences with their numbers, as the page has them; on several numbers of nodes once."""
    data = results(("gather_scatter", "ring", "ddp", "ddp_fp16"), accuracy=0.43, iteration=1.1)
    (block,) = blocks(data)
    said = "".join(
        f"{'- ' if one.caution else ''}{one.topic}: {one.text}\n    {one.evidence}\n"
        for one in findings(block)
    )
    assert said == GOLDEN.read_text(encoding="utf-8")


def test_times_to_accuracy_of_several_runs():
    data = changed({"settings.until_accuracy": 0.6})
    for repeat, seconds in zip(data.cells[1].repeats, (12.0, 10.5, None), strict=True):
        repeat.seconds_to_accuracy = seconds
    said = " ".join(texts(data))
    assert "after 11.2 s of training (10.5 to 12.0 s over 2 runs); 1 of 3 runs did not" in said
    assert "a run did not reach 60 % in any of 3 runs" in said  # of one node


def test_weak_scaling_compares_samples_per_second():
    data = results(("ring",), (1, 2), scaling="weak")  # 512 samples in 1.059 s, 256 in 1.0 s
    ring = blocks(data)[0].find("ring", 2)
    assert (ring.speedup, ring.efficiency) == pytest.approx((2 / 1.059, 1 / 1.059))


def test_tiny_numbers_keep_few_digits():
    assert [small_text(value) for value in (2.61e-5, 0.0171, 3.2)] == ["2.6e-5", "0.017", "3.2"]
