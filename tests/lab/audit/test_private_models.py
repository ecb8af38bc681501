"""Models that ranks train by themselves, and findings that suppose replicas: on made recordings."""

import numpy as np
import pytest

from lab.audit.findings import run_checks
from lab.audit.findings.private import shared_part
from lab.audit.records import Backward, Step
from lab.audit.result import verdict
from tests.lab.audit.recordings import COLUMNS, LOSS, gradients, mean, train


def summed(own, step):
    return len(own) * mean(own, step)


def nothing_sent(own, step):
    return own


def with_activations(exchange, *, losses=None, name="all_reduce", **options):
    """Return a training in whose forward passes the ranks exchange activations.

    losses : by rank, the value of its loss.
    """
    changes = [("backward", "value", lambda rank, record: losses[rank])] if losses else []
    recording = train(exchange, changes=changes, **options)
    for rank in recording.ranks:
        rank.call(name, content="other", within="forward", shape=[20], size=recording.size)
    return recording


def also_trains(recording, ranks, *, got=lambda own: own, inputs=lambda rank: 7, first=False):
    """Let some ranks train a second model of the same shapes; ``first``: as optimiser 0."""
    for rank in (recording.ranks[number] for number in ranks):
        number = 0 if first else 1
        if first:
            for record in rank.records:
                if hasattr(record, "optimizer_number"):
                    record.optimizer_number = 1
        (parameters,) = rank.records[1:2]
        rows = [
            [f"{number}.0.{i}", f"{number}.0.{i}", row.shape, row.dtype, row.numel, 90 + i]
            for i, row in enumerate(parameters.rows)
        ]
        rank.record("params", o=number, built=0, rows=rows)
        for step in range(4):
            loss = LOSS | {"samples": 24, "target_hash": 5}
            forwards = [[24, inputs(rank.rank), "module"]]
            rank.record("backward", step=step, loss=loss, forwards=forwards, optimizers=[number])
            own = gradients(9 + rank.rank, step)
            fields = {"own": rank.keep(own), "got": rank.keep(got(own)), "micro": 1}
            rank.record("step", o=number, step=step, **fields)
    return recording


def answer(recording):
    shared = shared_part(recording)
    checked = run_checks([shared])
    told = verdict([shared], checked.findings, checked.properties).answer
    return told, [finding.name for finding in checked.findings], shared.set_aside


@pytest.mark.parametrize("first", [False, True])
def test_a_model_that_one_rank_trains_alone_is_set_aside(first):
    told, found, aside = answer(also_trains(train(), [0], first=first))
    assert (told, found) == ("yes", [])
    assert [sentence[:6] for sentence in aside] == ["Rank 0"]


def test_what_is_wrong_beside_it_is_found():
    assert answer(also_trains(train(summed), [0]))[1] == ["sum-not-mean"]
    assert answer(also_trains(train(nothing_sent), [0]))[1] == ["own-gradient"]


def test_steps_and_backwards_are_counted_without_it():
    shared = shared_part(also_trains(train(), [0]))
    assert [len(rank.of(Step)) for rank in shared.ranks] == [4, 4, 4]
    assert [backward.step for backward in shared.ranks[0].of(Backward)] == [0, 1, 2, 3]
    assert {record.optimizer_number for record in shared.of(Step)} == {0}


def test_a_model_that_every_rank_trains_on_the_same_samples_is_set_aside():
    told, found, aside = answer(also_trains(train(), [0, 1, 2]))
    assert (told, found, len(aside)) == ("yes", [], 1)


def test_a_model_that_somebody_forgot_to_average_is_not():
    """Each rank trains it on its own samples."""
    _, found, aside = answer(also_trains(train(), [0, 1, 2], inputs=lambda rank: rank))
    assert (found, aside) == (["own-gradient"], ())


def test_a_further_model_whose_gradients_are_exchanged_is_not():
    recording = also_trains(train(), [0], got=lambda own: np.roll(own, 1))
    assert shared_part(recording) is recording


# --- ranks that exchange activations ---


def possible(recording):
    checked = run_checks([recording])
    names = [finding.name for finding in checked.findings]
    return names, [(finding.name, finding.condition) for finding in checked.possible]


def test_replicas_are_told_by_what_they_get():
    assert possible(with_activations(mean)) == ([], [])
    assert possible(with_activations(summed, losses=[1, 2, 3])) == (["sum-not-mean"], [])


def test_one_loss_of_all_ranks_may_be_added_up():
    names, ((name, condition),) = possible(with_activations(summed, losses=[2, 2, 2]))
    assert (names, name) == ([], "sum-not-mean")
    assert "own samples" in condition


def test_ranks_that_exchange_no_gradients_may_compute_one_model():
    changes = [("call", "content", lambda rank, call: "other")]
    recording = train(nothing_sent, changes=changes)
    for rank in recording.ranks:
        rank.call(content="other", within="forward", shape=[20], size=3)
        for record in rank.records:
            if hasattr(record, "within"):
                record.within = "forward"
    assert possible(recording) == ([], [("own-gradient", "the ranks are replicas")])
    checked = run_checks([recording])
    assert verdict([recording], checked.findings, checked.properties).answer == "cannot tell"


def test_replicas_are_told_by_exchanged_gradients_that_nobody_uses():
    """The gradients of all parameters are reduced, but too late."""
    assert possible(with_activations(nothing_sent)) == (["own-gradient"], [])


def test_an_exchange_of_some_parameters_leaves_it_open():
    def some(own, step):
        sent = own.copy()
        sent[:, : COLUMNS // 2] = own[:, : COLUMNS // 2].mean(axis=0)
        return sent

    fewer = [("call", "bytes", lambda rank, call: 40)]
    recording = train(some, changes=fewer)
    for rank in recording.ranks:
        rank.call(content="other", within="forward", shape=[20], size=3)
    names, told = possible(recording)
    assert names == []
    assert {condition for _, condition in told} == {"the ranks are replicas"}


def test_each_sentence_says_of_which_numbers_of_ranks():
    checked = run_checks([train(summed, size=size) for size in (2, 3)])
    (finding,) = [finding for finding in checked.findings if finding.name == "sum-not-mean"]
    assert [sentence[:11] for sentence in finding.evidence] == ["on 2 ranks:", "on 3 ranks:"]
