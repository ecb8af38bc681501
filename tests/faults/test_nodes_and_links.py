"""Slow or broken links, and nodes that start late.

Within the timeout they only cost time; beyond it, the other ranks stop with a message.
"""

import time

import pytest

from lab.cluster import Cluster
from tests.helpers.stage import (
    GRACE,
    NODES,
    TIMEOUT,
    Stage,
    assert_equal_runs,
    assert_no_result,
    assert_told,
)

SILENT = r"rank \d \([\d.]+\)( has not moved since|, this one, stood still for) "


@pytest.mark.usefixtures("links")
def test_a_link_cut_and_restored_within_the_timeout_costs_time_alone(stage, undisturbed):
    stage.start(hurt=(1, "forward", "hold"))
    stage.wait_for("held now", node=1)
    stage.cluster.fault(1, "cut")
    stage.let_go()
    time.sleep(2)  # while the link is cut
    assert "step 3/" not in stage.text(0)
    stage.cluster.fault(1, "restore")
    assert [ended.status for ended in stage.end().values()] == [0] * NODES
    assert_equal_runs(stage.run(), undisturbed("all_reduce"))


@pytest.mark.slow
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_link_cut_for_good_ends_all_within_the_timeout(stage, victim):
    stage.start("gather_scatter", hurt=(victim, "forward", "hold"), timeout=TIMEOUT)
    stage.wait_for("held now", node=victim)
    stage.cluster.fault(victim, "cut")
    stage.let_go()
    for ended in stage.end(TIMEOUT + GRACE).values():
        assert_told(ended, SILENT)
    assert_no_result(stage.run("gather_scatter"))


@pytest.mark.slow
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("moment", ["meeting", "loading"])
def test_a_link_cut_before_the_training_ends_all_within_the_timeout(stage, moment):
    """While the ranks join, or load the dataset: that may take long, but a rank must answer."""
    if moment == "meeting":
        stage.start(nodes=[0, 1], timeout=TIMEOUT)
        time.sleep(2)  # by now both wait for the third rank
    else:
        stage.start(hurt=(1, "loading", "sleep"), timeout=TIMEOUT)
        stage.wait_for("loading now", node=1)
    stage.cluster.fault(1, "cut")
    told = [r"missing: rank 2", r"lost rank 0 at \S+ while the ranks were meeting"]
    for rank, ended in stage.end(TIMEOUT * 2 + GRACE).items():
        assert_told(ended, SILENT if moment == "loading" else told[rank])


@pytest.mark.slow
@pytest.mark.usefixtures("links")
def test_a_link_at_a_tenth_of_its_rate_gives_the_same_result(images, tmp_path, undisturbed):
    with Cluster(NODES, rate="1gbit", logs=tmp_path) as cluster:
        stage = Stage(cluster, images, tmp_path)
        stage.start(hurt=(2, "forward", "hold"))
        stage.wait_for("held now", node=2)
        cluster.fault(2, "slow", rate="100mbit")
        stage.let_go()
        ends = stage.end()
    assert [ended.status for ended in ends.values()] == [0] * NODES
    assert_equal_runs(stage.run(), undisturbed("all_reduce"))


@pytest.mark.slow
def test_a_node_that_comes_late_but_in_time_takes_part(stage, undisturbed):
    stage.start(nodes=[0, 1])
    time.sleep(3)  # late
    stage.start(nodes=[2], port=stage.port)
    assert [ended.status for ended in stage.end().values()] == [0] * NODES
    assert_equal_runs(stage.run(), undisturbed("all_reduce"))


@pytest.mark.slow
def test_a_node_that_comes_too_late_is_named_and_told(stage):
    stage.start(nodes=[0, 1], timeout=6)
    ends = stage.end(6 + GRACE)
    for ended in ends.values():
        assert_told(ended, r"2 of 3 ranks came to \S+ within 6 s; missing: rank 2")
    stage.start(nodes=[2], timeout=3, port=stage.port)
    refused = r"rank 2 could not reach rank 0 at \S+ within 3 s \(connection refused\)"
    assert_told(stage.end()[2], refused)
    assert not stage.run().exists()
