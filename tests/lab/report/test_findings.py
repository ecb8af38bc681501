"""The findings of a report: each appears only if the numbers support it."""

import copy

import pytest

from lab.report.findings import findings
from lab.report.findings.limits import noisy, oversubscription, unfinished
from lab.report.findings.prediction import bytes_as_predicted, predictions
from lab.report.findings.speed import (
    bounds,
    fastest,
    overlaps,
    root_share,
    slower_than_one,
    stragglers,
)
from lab.report.findings.training import accuracies, time_to_accuracy
from lab.report.view import blocks
from tests.helpers.report_samples import cell, predicted, results, timeline


def block(
    *cells,
    scaling="strong",
    prediction=None,
    **settings,
):
    """Return the block of ``cells``, with a one-node cell added if there is none."""
    one = [] if any(entry["nodes"] == 1 for entry in cells) else [cell("none", 1, scaling=scaling)]
    (found,) = blocks(
        {
            "cells": [*one, *cells],
            "settings": {"dataset": "cifar10", "scaling": scaling, **settings},
            "prediction": prediction,
        }
    )
    return found


def said(found):
    return "\n".join(finding.text for finding in found)


def test_fastest_is_named_only_where_intervals_lie_apart():
    # 0.494 s and 0.284 s, each ± 2 %
    apart = said(fastest(block(cell("gather_scatter", 4), cell("ddp", 4))))
    assert (
        "On 4 nodes ddp is fastest: 0.284 s [0.278, 0.290] a step. Next is gather_scatter with "
        "0.494 s [0.484, 0.504]" in apart
    )
    # 0.524 s, 0.514 s and 0.584 s
    three = block(cell("overlapped", 2), cell("ddp", 2), cell("gather_scatter", 2))
    close = list(fastest(three))
    assert (
        "ddp has the shortest median step, 0.514 s [0.504, 0.524], but the 95 % intervals overlap: "
        "overlapped may be as fast." in close[0].text
    )
    assert "is fastest" not in said(close)


def test_one_repeat_allows_no_order():
    text = said(fastest(block(cell("gather_scatter", 4, repeats=1), cell("ddp", 4, repeats=1))))
    assert "each strategy ran once: without an interval no order is certain" in text
    assert "fastest" not in text
    mixed = said(
        fastest(block(cell("gather_scatter", 4), cell("all_reduce", 4), cell("ddp", 4, repeats=1)))
    )
    assert "all_reduce is fastest" in mixed
    assert "Left out, because it ran once and has no interval: ddp." in mixed


def test_a_fastest_that_is_not_exact_is_said_to_be_so():
    text = said(
        fastest(block(cell("gather_scatter", 4), cell("all_reduce", 4), cell("ddp_powersgd", 4)))
    )
    assert "On 4 nodes ddp_powersgd (not exact) is fastest" in text
    assert "On 4 nodes, of the exact strategies, all_reduce is fastest" in text


def test_nothing_is_compared_with_itself_or_with_what_failed():
    text = said(fastest(block(cell("ring", 2), cell("ddp", 2, status="failed", message="boom"))))
    assert text == ("On 2 nodes only ring has been measured: there is nothing to compare it with.")
    assert said(fastest(block(cell("ddp", 2, status="pending")))) == ""
    pending = block(cell("none", 1, status="pending"), cell("ddp", 2, status="pending"))
    assert "No run has ended yet" in findings(pending)[0].text


@pytest.mark.parametrize(
    ("scale", "repeats", "expected"),
    [
        (4.0, 3, "is slower than one node, even at the favourable ends"),
        (1.83, 3, "by the medians, but the 95 % intervals overlap"),
        (4.0, 1, "without intervals (one repeat) this is not certain"),
        (1.0, 3, ""),
    ],
)
def test_speed_up_below_one(scale, repeats, expected):
    # 0.555 s * scale + 0.004 s, compared with 1 s
    text = said(slower_than_one(block(cell("ring", 2, scale=scale, repeats=repeats))))
    assert (expected in text) if expected else text == ""


def test_repeats_far_apart_are_pointed_out():
    uneven = cell("ring", 2)
    uneven["interval"]["step"] = [0.0, 3.0]
    assert "The repeats of ring on 2 nodes differ so much" in said(
        noisy(block(uneven, cell("ddp", 2)))
    )
    assert said(noisy(block(cell("ring", 2)))) == ""


def test_an_interval_that_reaches_zero_leaves_the_speed_up_open():
    slow = cell("ring", 2, scale=4.0)
    slow["interval"]["step"] = [0.0, 5.0]
    found = block(slow)
    assert found.find("ring", 2).speedup_interval == pytest.approx((0.98 / 5, float("inf")))
    assert "by the medians, but the 95 % intervals overlap" in said(slower_than_one(found))


def test_weak_scaling_compares_throughput():
    # 512 samples in 1.059 s, compared with 256 in 1.0 s
    found = block(cell("ring", 2, scaling="weak"), scaling="weak")
    assert found.find("ring", 2).speedup == pytest.approx(2 / 1.059)
    assert found.find("ring", 2).efficiency == pytest.approx(1 / 1.059)
    slow = said(slower_than_one(block(cell("ring", 2, scaling="weak", scale=3.0), scaling="weak")))
    assert "processing fewer samples a second than one node" in slow


def test_bounds_and_stragglers():
    both = block(cell("gather_scatter", 4, scale=0.9), cell("ddp", 4), cell("ring", 4, wait=0.5))
    both.find("gather_scatter", 4).cell["median"].update(wire=0.9, sync=0.904)
    text = said(bounds(both))
    assert "communication on the wire with gather_scatter" in text
    assert "update) with ddp" in text
    assert "waiting for slower ranks with ring" in text
    assert "ring: ranks wait longer for slower ranks than sending takes. A faster" in said(
        stragglers(both)
    )
    assert "than sending takes, but the 95 % intervals overlap" in said(
        stragglers(block(cell("ring", 4, wait=0.5, repeats=1)))
    )
    assert "no strategy waits longer" in said(stragglers(block(cell("ddp", 4))))
    unsplit = block(cell("ddp", 4))
    unsplit.find("ddp", 4).cell["median"].update(wait=None, wire=None)
    assert said(bounds(unsplit)) == said(stragglers(unsplit)) == ""


def test_root_share():
    # 3 of 6 million bytes; an equal share is a quarter
    text = said(root_share(block(cell("gather_scatter", 4), cell("ring", 4))))
    assert (
        "rank 0 sends more than its share with gather_scatter: up to 50.0 % of all bytes; an "
        "equal share would be 25.0 %" in text
    )
    assert "ring" not in text
    assert "rank 0 does not send much more than the others with any strategy" in said(
        root_share(block(cell("gather_scatter", 2)))
    )


def test_accuracy_near_chance_shows_nothing():
    near = list(accuracies(block(cell("ring", 2, accuracy=0.13), cell("ddp", 2, accuracy=0.13))))
    assert "of ring and ddp is near chance (at most 15.0 % with 10 classes)" in near[0].text
    assert len(near) == 1
    above = said(accuracies(block(cell("ring", 2, accuracy=0.43), cell("topk", 2, accuracy=0.40))))
    assert "On 2 nodes the test accuracy of ring is 42.8 % to 43.2 %." in above
    assert (
        "topk, which does not claim to be exact, reaches 40.0 %; the exact strategies 42.8 % to "
        "43.2 %: 3.0 points below their mean" in above
    )
    assert "Each ran once" in said(accuracies(block(cell("ring", 2, accuracy=0.43, repeats=1))))
    assert said(accuracies(block(cell("ring", 2)))) == ""
    assert "the number of classes is unknown" in said(
        accuracies(block(cell("ring", 2, accuracy=0.9), dataset="folder"))
    )


def test_time_to_accuracy():
    ran = cell("ring", 2, seeds=(0, 1, 2))
    for repeat, seconds in zip(ran["repeats"], (12.0, 10.5, None), strict=True):
        repeat.update(
            seconds_to_accuracy=seconds, steps_to_accuracy=None if seconds is None else 40
        )
    text = said(time_to_accuracy(block(ran, until_accuracy=0.6)))
    assert (
        "ring reached 60 % after 11.2 s of training (10.5 to 12.0 s over 2 runs); 1 of 3 runs "
        "did not reach it." in text
    )
    assert "a run did not reach 60 % in any of 3 runs" in text  # the one-node cell
    assert said(time_to_accuracy(block(ran))) == ""


def test_predictions_and_bytes():
    cells = [cell("ring", 2), cell("ddp", 2), cell("ring", 4)]
    errors = {"ring-n2": 0.1, "ddp-n2": -0.25, "ring-n4": 0.6}
    prediction = {"cells": {entry["id"]: predicted(entry, errors[entry["id"]]) for entry in cells}}
    found = block(*cells, prediction=prediction)
    text = said(predictions(found))
    assert "1 of 2 predictions in scope lie within 20 %" in text
    assert "the largest error is -25.0 % (ddp, 2 nodes). Outside: ddp, 2 nodes (-25.0 %)." in text
    assert (
        "1 prediction is outside the model's scope (more ranks than cores); its error, +60.0 %, is "
        "shown but not counted." in text
    )
    assert "as many bytes as the formulas say, in all 3 cells" in said(bytes_as_predicted(found))
    wrong = copy.deepcopy(prediction)
    wrong["cells"]["ring-n4"]["bytes_sent"][2] += 4
    assert "differ from the formulas with ring, 4 nodes." in said(
        bytes_as_predicted(block(*cells, prediction=wrong))
    )
    assert said(predictions(block(*cells))) == said(bytes_as_predicted(block(*cells))) == ""


def test_cautions():
    shared = block(cell("ring", 4, oversubscribed=True), cell("ring", 2))
    assert "On 4 nodes the ranks share cores" in said(oversubscription(shared))
    assert said(oversubscription(block(cell("ring", 2)))) == ""
    text = said(
        unfinished(
            block(
                cell("ring", 2, status="failed"),
                cell("tree", 2, status="failed"),
                cell("ddp", 2, status="pending"),
                cell("topk", 2, status="partial"),
            )
        )
    )
    assert "tree on 2 nodes and ring on 2 nodes failed and are left out of every comparison" in text
    assert "ddp on 2 nodes has not run yet" in text
    assert "topk on 2 nodes is only partly done" in text


def test_overlap_is_told_for_the_recorded_step():
    found = block(cell("ring", 2), cell("overlapped", 2))
    steps = {
        "ring-n2": timeline("ring", 2),
        "overlapped-n2": timeline("overlapped", 2, overlapped=True),
    }
    text = said(overlaps(found, steps))
    assert (
        "On 2 nodes, in the one recorded step, communication overlaps backward with overlapped ("
        in text
    )
    assert "ring" not in text
    assert "ring sends nothing during backward" in said(
        overlaps(found, {"ring-n2": steps["ring-n2"]})
    )
    assert said(overlaps(found, {})) == ""


def test_what_holds_on_several_numbers_of_nodes_is_said_once():
    data = results(("ring", "ddp"), accuracy=0.11)
    (found,) = blocks(data)
    texts = [finding.text for finding in findings(found, data["timelines"])]
    # one for one node, one for both larger numbers together
    assert sum("near chance" in text for text in texts) == 2
    assert any(
        text.startswith("On 2 and 4 nodes the test accuracy of ring and ddp is near chance")
        for text in texts
    )
    assert len(texts) == len(set(texts))
