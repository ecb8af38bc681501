"""A rank stands still for longer than the timeout: every other rank names it, and where it is."""

import re
from functools import partial

import pytest

from lab.cluster import Cluster, tools
from tests.helpers.hurt import STEPS_AN_EPOCH
from tests.helpers.stage import EPOCHS, GRACE, TIMEOUT, Stage, assert_no_result, assert_told

LAST = EPOCHS * STEPS_AN_EPOCH
PLACES = {
    "training": ("forward", STEPS_AN_EPOCH, r"all_reduce of step 3"),
    "end of epoch": ("epoch", LAST, r"\w+ of the end of the epoch at step 4"),
    "checkpoint": ("writing", LAST, r"\w+ of the checkpoint at step 4"),
    "evaluation": ("evaluation", LAST, r"\w+ of the evaluation at step 4"),
}
"""By place: the moment of hurt.py, the step that the rank has reached, where the others wait."""
in_slow = partial(pytest.param, marks=pytest.mark.slow)
in_long = partial(pytest.param, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory):
    """Start a cluster of four nodes."""
    refused = tools.namespaces_refused()
    with Cluster(4, logs=tmp_path_factory.mktemp("nodes"), loopback=refused is not None) as nodes:
        yield nodes


@pytest.fixture
def stage_of_four(four_nodes, images, tmp_path):
    """Prepare one test's runs on four nodes, and kill whatever still runs afterwards."""
    stage = Stage(four_nodes, images, tmp_path)
    yield stage
    stage.kill_all()


def survivors(stage, size, hurt):
    """Run until all ranks but the hurt one have ended; kill that one, and return the others."""
    victim = hurt[0]
    stage.start(nodes=range(size), size=size, hurt=hurt, timeout=TIMEOUT)
    for rank in set(range(size)) - {victim}:
        stage.wait_for(f"error (rank {rank})", node=rank, limit=90 + TIMEOUT + GRACE)
    stage.cluster.fault(victim, "kill")
    ends = stage.end()
    assert_no_result(stage.run())
    return [ended for rank, ended in ends.items() if rank != victim]


def marked(place, size, victim):
    """Return the case with its mark: ``make test-slow`` stops another rank in each place."""
    if (place, victim) == ("training", 1):
        return place, size, victim
    slow = victim == {"training": 2, "end of epoch": 0, "checkpoint": 0, "evaluation": 1}[place]
    return (in_slow if slow else in_long)(place, size, victim)


@pytest.mark.parametrize(
    ("place", "size", "victim"),
    [marked(place, *which) for place in PLACES for which in ((2, 0), (2, 1), (4, 2))],
)
def test_a_stopped_rank_is_named_with_its_step(request, place, size, victim):
    stage: Stage = request.getfixturevalue("stage_of_four" if size == 4 else "stage")
    moment, step, waiting = PLACES[place]
    if place == "checkpoint" and victim > 0:
        moment = "waiting"  # rank 0 writes
    ends = survivors(stage, size, (victim, moment, "stop"))
    who = "the others wait" if size > 2 and victim else r"rank \d waits"
    told = (
        rf"error \(rank \d\): rank {victim} \([\d.]+\) has not moved since [a-z ]*step {step}, "
        rf"(\d+\.\d) s ago; {who} in {waiting}\. \(\w+ broke here\)"
    )
    for ended in ends:
        assert_told(ended, told)
        assert TIMEOUT - 1 <= float(re.search(told, ended.text)[1]) < TIMEOUT + GRACE


@pytest.mark.parametrize("victim", [in_slow(0), in_long(1)])
def test_a_rank_stopped_while_it_reads_the_dataset_is_named(stage, victim):
    """The others exchange a message a second until all have read it."""
    stage.start(nodes=[0, 1], size=2, hurt=(victim, "loading", "stop"), timeout=TIMEOUT)
    stage.wait_for(f"error (rank {1 - victim})", node=1 - victim, limit=90 + TIMEOUT + GRACE)
    stage.cluster.fault(victim, "kill")
    assert_told(
        stage.end()[1 - victim],
        rf"rank {victim} \([\d.]+\) has not moved since (the start|reading the dataset), "
        rf"[\d.]+ s ago; rank {1 - victim} waits in all_reduce of reading the dataset\.",
    )


@pytest.mark.parametrize(
    ("victim", "moment", "place"),
    [
        in_slow(2, "forward", "forward of step 3"),
        in_slow(0, "writing", "the checkpoint at step 4"),
        in_slow(0, "epoch", "the end of the epoch at step 4"),
        in_long(0, "forward", "forward of step 3"),
        in_long(2, "epoch", "the end of the epoch at step 4"),
        in_long(0, "evaluation", "the evaluation at step 4"),
        in_long(2, "evaluation", "the evaluation at step 4"),
    ],
)
def test_a_rank_that_lives_but_is_busy_elsewhere_is_named(stage, victim, moment, place):
    """As in a debugger, or on a slow disk: the rank lives, but does not come."""
    for ended in survivors(stage, 3, (victim, moment, "sleep")):
        assert_told(
            ended,
            rf"error \(rank \d\): rank {victim} \([\d.]+\) has been in {place} for [\d.]+ s; "
            r"the others wait in \w+ of (the [a-z ]+ at )?step \d\. \(\w+ broke here\)",
        )


@pytest.mark.parametrize("victim", [in_slow(2), in_long(0)])
def test_a_collective_that_one_rank_alone_calls_is_named(stage, victim):
    stage.start(nodes=range(3), size=3, hurt=(victim, "epoch", "detour"), timeout=TIMEOUT)
    for ended in stage.end().values():
        assert_told(
            ended,
            rf"error \(rank \d\): rank {victim} \([\d.]+\) waits in all_gather_object of the "
            r"end of the epoch at step 4; the others wait in all_reduce of the [a-z ]+ at step 4: "
            r"the ranks did not call the same collective\.",
        )


@pytest.mark.parametrize("victim", [in_slow(0), in_long(1)])
def test_a_rank_that_wakes_too_late_names_itself(stage, victim):
    stage.start(nodes=[0, 1], size=2, hurt=(victim, "forward", "stop"), timeout=TIMEOUT)
    stage.wait_for(f"error (rank {1 - victim})", node=1 - victim, limit=90 + TIMEOUT + GRACE)
    stage.cluster.fault(victim, "restore")
    assert_told(stage.end(GRACE + TIMEOUT)[victim], rf"error \(rank {victim}\): rank {victim} \(")
