"""The steps between strategies add up to the whole difference, also in the sample report."""

import time
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

from common.profiling.comm_trace import Timeline
from common.profiling.records import RankTimeline, SentMessage
from common.runs import TimelineFile
from common.sync import STRATEGIES, topk
from lab.comparison.record import read_comparison
from lab.report.causes import apart, beside, decomposition, missing, why
from lab.report.findings import findings, step_parts
from lab.report.timeline import hidden_seconds, length, sync_parts, union
from lab.report.verdict import verdict
from lab.report.view import blocks, steady, tied
from tests.helpers import run_ranks
from tests.helpers.engines import prepared
from tests.helpers.report_samples import BYTES, cell, on, results, set_times

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "reports" / "samples" / "compare-digits-1gbit" / "results.json"


def rows_of(*cells):
    data = results(predict=False)
    data.cells = list(cells)
    data.timelines = {}
    (block,) = blocks(data)
    return block.measured


@pytest.fixture(scope="module")
def sample():
    comparison = read_comparison(SAMPLE)
    (block,) = blocks(comparison)
    return comparison, block


def test_the_sample_s_steps_add_up_to_its_headline(sample):
    """The numbers on the right are computed from the file alone."""
    comparison, block = sample
    means = {}
    for entry in comparison.cells:
        steps = [fmean(rank.seconds.step for rank in run.ranks) for run in entry.runs]
        means[entry.sync] = fmean(steps)
    steps = decomposition(block.at(4))
    assert [(gap.slower.sync, gap.faster.sync, gap.apart) for gap in steps] == [
        ("gather_scatter", "all_reduce", ["way"]),
        ("all_reduce", "overlapped", ["pieces", "leave"]),
    ]
    whole = means["gather_scatter"] - means["overlapped"]
    assert sum(gap.seconds for gap in steps) == pytest.approx(whole, abs=1e-12)
    root, rest = steps
    assert root.seconds == pytest.approx(means["gather_scatter"] - means["all_reduce"], abs=1e-12)
    assert root.seconds / whole == pytest.approx(0.885, abs=0.001)
    assert rest.seconds / whole == pytest.approx(0.115, abs=0.001)
    assert missing(rest) == ["all_reduce_flat"]
    # rank 0's first message leaves at 0.068 s, and its last gradient comes at 0.163 s
    assert rest.faster.timeline is not None
    assert hidden_seconds(rest.faster.timeline.ranks) == pytest.approx(0.095, abs=0.001)
    answer = verdict(block, [])
    _, first, *_ = answer.why.splitlines()
    assert "from gather_scatter to all_reduce" in first, "the greatest step is named first"


def test_the_assignment_s_pair_is_compared_although_the_chain_passes_it_by(sample):
    _, block = sample
    rows = block.at(4)
    pairs = {(gap.slower.sync, gap.faster.sync): gap for gap in beside(rows, decomposition(rows))}
    assert pairs.keys() == {("ddp", "overlapped"), ("all_reduce", "ddp")}
    assert pairs["ddp", "overlapped"].uncertain
    assert pairs["ddp", "overlapped"].apart == ["code"]
    assert pairs["all_reduce", "ddp"].seconds == pytest.approx(0.174, abs=0.001)
    assert not pairs["all_reduce", "ddp"].uncertain


def test_a_measured_strategy_separates_what_was_together():
    rows = rows_of(*on(4, "gather_scatter", "all_reduce", "all_reduce_flat", "overlapped", "ddp"))
    steps = decomposition(rows)
    assert [gap.apart for gap in steps] == [["way"], ["pieces"], ["leave"], ["code"]]
    assert all(missing(gap) == [] for gap in steps)
    slowest, fastest = max(rows, key=lambda row: row.seconds), min(rows, key=lambda r: r.seconds)
    assert sum(gap.seconds for gap in steps) == pytest.approx(slowest.seconds - fastest.seconds)


def test_steps_within_the_noise_are_said_to_be():
    cells = on(4, "gather_scatter", "all_reduce", "all_reduce_flat")
    for entry, seconds in zip(cells, (0.5, 0.402, 0.4), strict=True):
        set_times(entry, seconds, high=seconds + 0.01)
    first, second = decomposition(rows_of(*cells))
    assert (first.uncertain, second.uncertain) == (False, True)
    assert first.interval == pytest.approx((0.078, 0.118))
    assert second.interval == pytest.approx((-0.018, 0.022))
    assert "within the noise" in why(second)
    assert "within the noise" not in why(first)


def test_every_pair_of_strategies_differs_in_something():
    names = [name for name in STRATEGIES if name != "none"]
    for first in names:
        same = [other for other in names if other != first and not apart(first, other)]
        assert not same, first
    assert apart("ddp", "ddp-9") == ["bucket"]
    assert apart("ring", "of_a_student") == apart("of_a_student", "ring")


def test_a_tie_names_all_that_lie_in_it_and_a_noisy_one_last():
    cells = on(4, "ring", "tree", "ddp", "overlapped")
    times = {"ring": (0.4, 0.9), "tree": (0.5, 0.51), "ddp": (0.505, 0.515), "overlapped": (1, 1.1)}
    for entry in cells:
        set_times(entry, times[entry.sync][0], high=times[entry.sync][1])
    rows = rows_of(*cells)
    assert [row.sync for row in tied(rows)] == ["tree", "ddp", "ring"]
    assert steady(rows)[0].sync == "tree"
    assert [gap.slower.sync for gap in decomposition(rows)][:1] == ["overlapped"]


def test_a_number_s_interval_lies_around_it():
    """With repeats of 1, 1 and 4 s the median would lie at the edge of the mean's interval."""
    [entry] = on(4, "ring", iteration=1.5)
    for run, seconds in zip(entry.repeats, (1.0, 1.0, 4.0), strict=True):
        run.mean_iteration_seconds = seconds
    [row] = rows_of(entry)
    low, high = row.interval("seconds")
    assert row.seconds == pytest.approx(2.0)
    assert (low, high) == (0, pytest.approx(2 + 4.302653))
    assert row.step == pytest.approx(fmean(run.ranks[0].seconds.step for run in entry.repeats))
    low, high = row.interval("step")
    assert (low + high) / 2 == pytest.approx(row.step)


def test_iterations_are_compared_only_if_every_run_has_them():
    cells = on(4, "ring", "ddp", iteration=1.5)
    assert [row.by_iterations for row in rows_of(*cells)] == [True, True]
    cells[0].repeats[0].mean_iteration_seconds = None
    assert [row.seconds == row.step for row in rows_of(*cells)] == [True, True]


def test_what_a_strategy_computes_is_no_message():
    """Of 1.0 s of sync topk's messages take a tenth; all_reduce's take all of 0.5 s."""
    data = results(predict=False)
    data.cells = on(2, "all_reduce", "topk")
    for entry, sync in zip(data.cells, (0.5, 1.0), strict=True):
        set_times(entry, sync + 0.2, high=sync + 0.21)
        entry.medians.sync = sync
        entry.medians.wire = sync
        entry.medians.wait = 0.0
    searching = [SentMessage("all_gather", 8, 8.0, 1.1, 1.2)]
    sending = [SentMessage("all_reduce", 8, 8.0, 0.2, 0.7)]
    data.timelines = {"topk-n2": step(1.2, searching), "all_reduce-n2": step(0.7, sending)}
    block, parts = parts_of(data)
    assert parts["topk"] == pytest.approx(
        {"compute": parts["topk"]["compute"], "wait": 0, "messages": 0.1, "own work": 0.9}
    )
    assert parts["all_reduce"]["own work"] == pytest.approx(0, abs=1e-9)
    [gap] = decomposition(block.at(2))
    assert gap.communication == pytest.approx(1)
    assert gap.own_work == pytest.approx(1.8)
    assert not gap.by_messages
    # without a recorded step nobody knows how much of it messages take
    data.timelines = {}
    block, parts = parts_of(data)
    assert parts["topk"]["exchange"] == 1.0
    assert "own work" not in parts["topk"]
    [gap] = decomposition(block.at(2))
    assert "not separated" in why(gap)


def step(end, messages):
    """Return a step of two equal ranks with sync from 0.2 s to ``end``."""
    sections = {"backward": [(0.0, 0.2)], "sync": [(0.2, end)]}
    return TimelineFile(1, "x", 9, [RankTimeline(rank, sections, messages) for rank in range(2)])


def parts_of(data):
    (block,) = blocks(data)
    return block, {row.sync: step_parts(row) for row in block.at(2)}


def test_bytes_come_from_the_plan_where_none_were_counted():
    cells = on(4, "gather_scatter", "ring")
    for entry in cells:
        entry.medians.root_bytes_sent = None
        entry.medians.others_bytes_sent = None
    root, ring = rows_of(*cells)
    assert root.bytes_sent == pytest.approx([3 * BYTES, BYTES, BYTES, BYTES])
    assert ring.bytes_sent == pytest.approx([1.5 * BYTES] * 4)
    assert root.root_share == pytest.approx(0.5)
    assert not root.counted
    for run in cells[0].repeats:
        for rank in run.ranks:
            rank.predicted_memory = None
    root, _ = rows_of(*cells)
    assert root.root_share is None


def said(*cells, alone=None, **settings):
    data = results(predict=False)
    data.cells = [alone or cell("none", 1), *cells]
    data.timelines = {}
    data.settings |= settings
    (block,) = blocks(data)
    return " ".join(finding.text for finding in findings(block))


def test_slower_than_one_rank_says_what_the_ranks_share():
    slow = {"scale": 4.0}
    [ranks] = on(2, "ring", **slow)
    for run in ranks.repeats:
        for rank in run.ranks:
            rank.host = "laptop"
    assert "they share its cores, and memory is their network" in said(ranks)
    ranks.oversubscribed = True
    assert "The ranks share cores: they compute in turns" in said(ranks)
    apart = said(*on(2, "ring", **slow))
    # half of 4 s of computing, and 0.22 s + 4 ms of communication
    assert "compute takes 2.000 s, with one node 1.000 s; exposed communication" in apart
    assert "takes 0.224 s" in apart
    assert "share" not in apart.partition("compute takes")[2].partition("exposed")[0]
    assert "compute takes" not in said(*on(2, "ring"))


def test_losses_of_one_rank_and_of_shards_differ_by_batchnorm():
    """The first step's loss, of the same weights and samples; later ones differ by its update."""
    phrase = "BatchNorm normalises over the shard"
    same = [2.3, 2.2, 2.1]
    alone = cell("none", 1, losses=same)
    assert phrase in said(*on(2, "ring", losses=[2.31, 2.2, 2.1]), alone=alone)
    assert phrase not in said(*on(2, "ring", losses=[2.3, 2.25, 2.1]), alone=alone)
    assert phrase not in said(*on(2, "ring", losses=[2.31, 2.2]), alone=alone, model="of mine")
    weak = on(2, "ring", losses=[2.31, 2.2], scaling="weak")
    assert phrase not in said(*weak, alone=alone, scaling="weak")
    assert phrase not in said(*on(2, "topk", losses=[2.31, 2.2]), alone=alone)


def test_training_accuracy_stands_beside_that_of_the_test():
    phrase = "running averages, which lag behind"
    for steps, trained, found in ((40, 0.6, True), (40, 0.45, False), (400, 0.6, False)):
        cells = on(2, "ring", accuracy=0.43, losses=[1.0] * steps)
        for run in cells[0].repeats:
            run.train_accuracy = trained
        assert (phrase in said(*cells)) == found, (steps, trained)


def searches_slowly(rank):
    """Train three steps with topk whose search takes 50 ms more, and record the third."""
    torch.manual_seed(0)
    search = topk.largest
    topk.largest = lambda values, count: time.sleep(0.05) or search(values, count)
    engine = prepared(nn.Linear(10, 3), "topk")
    engine.timeline = Timeline(3, 3)
    engine.train_epoch([(torch.randn(2, 10), torch.tensor([0, 1]))] * 3, epoch=1)
    engine.close()
    lane = engine.timeline.steps[3]
    assert [message.kind for message in lane.messages] == ["all_gather", "all_gather"]
    parts = sync_parts([lane], lane)
    assert length(parts["own"]) >= 0.05
    under_way = length(union((message.begin, message.end) for message in lane.messages))
    assert length(parts["wire"]) == pytest.approx(under_way)
    whole = length(parts["own"]) + length(parts["wire"])
    assert whole == pytest.approx(length(lane.sections["sync"]))


def test_real_ranks_that_compress_compute_between_their_messages():
    run_ranks(2, searches_slowly)
