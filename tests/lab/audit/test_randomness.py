"""Do the ranks draw the same random numbers? On records as the probe writes them."""

import random
from dataclasses import replace

import pytest
import torch
from numpy import random as numpy_random

from lab.audit.findings import samples
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.probe import randomness as probed
from lab.audit.records import Batch, Drew
from tests.lab.audit.recordings import Rank, load, probe_record
from tests.lab.audit.test_findings_samples import right, whole


def recorded(state, draws=right, *, other_batches=False):
    """Return the recording of ranks that make batch ``b`` when "random" is in ``state(rank, b)``.

    other_batches : what was made was not trained on.
    """
    recording = load(draws)
    for rank in recording.ranks:
        for number, batch in enumerate(rank.of(Batch)):
            indices = [-1] if other_batches else batch.indices
            states = {"random": state(rank.rank, number), "torch": 10 * number + rank.rank}
            rank.add(probe_record("drew", indices=indices, states=states))
    return recording


def once(rank, epoch):
    """Return one batch an epoch, of which the first alone is recorded."""
    return right(rank, epoch)[:16]


def alike(rank, number):
    return number


def own(rank, number):
    return 100 * rank + number


def by_index(rank, number):
    return 7 if number == 0 else own(rank, number)


def sometimes(rank, number):
    return number if number == 3 else own(rank, number)


def mostly(rank, number):
    return own(rank, number) if number == 3 else number


def said(recording):
    """Return what is said of the random numbers of samples."""
    outcomes = samples.check(recording)
    return [one for one in outcomes if "augmentation" in (getattr(one, "of", ""), broken(one))]


def broken(outcome):
    return outcome.entry.broken if isinstance(outcome, Finding) else ""


@pytest.mark.parametrize(
    ("recording", "kind"),
    [
        (recorded(alike), Finding),
        (recorded(own), Right),
        (recorded(by_index), Right),
        (recorded(sometimes), Right),
        (recorded(mostly), Finding),
        (recorded(alike, once), Unknown),
        (recorded(alike, whole), None),  # same-samples says what is wrong
        (recorded(alike, other_batches=True), None),
        (load(right), None),  # nothing is drawn
    ],
)
def test_equal_states_of_generators_are_found_where_samples_differ(recording, kind):
    kinds = [type(outcome) for outcome in said(recording)]
    assert kinds == ([] if kind is None else [kind])


def moved_to_workers(recording, parents):
    """Move what was drawn to processes of their own, which these processes have started."""
    workers = []
    for rank, parent in zip(recording.ranks, parents, strict=True):
        worker = Rank(10 + rank.rank)
        worker.record("start", ppid=parent)
        for drew in rank.of(Drew):
            worker.add(drew)
        rank.of(Drew).clear()
        workers.append(worker)
    return replace(recording, others=workers)


def test_a_worker_belongs_to_the_rank_that_started_it():
    recording = recorded(alike)
    by_ranks = moved_to_workers(recording, [rank.pid for rank in recording.ranks])
    (outcome,) = said(by_ranks)
    assert isinstance(outcome, Finding)
    assert not said(moved_to_workers(recorded(alike), [1, 1]))


@pytest.mark.parametrize(
    ("draw", "changed"),
    [
        (lambda: None, set()),
        (random.random, {"random"}),
        (lambda: torch.rand(()), {"torch"}),
        (numpy_random.rand, {"numpy.random"}),
    ],
)
def test_the_state_of_every_generator_tells_what_was_drawn(draw, changed):
    before = probed._states()
    assert before == probed._states()  # looking draws nothing
    draw()
    after = probed._states()
    assert {name for name in before if before[name] != after[name]} == changed
