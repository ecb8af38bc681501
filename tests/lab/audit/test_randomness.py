"""Do the ranks draw the same random numbers? On records as the probe writes them."""

import random
from dataclasses import replace

import pytest
import torch
from numpy import random as numpy_random
from torch.utils.data import Dataset, Subset

from lab.audit.findings import randomness
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


def alike(rank, number):
    return number


def own(rank, number):
    return 100 * rank + number


def by_index(rank, number):
    return 7 if number == 0 else own(rank, number)


def sometimes(rank, number):
    return number if number == 3 else own(rank, number)


@pytest.mark.parametrize(
    ("recording", "kind"),
    [
        (recorded(alike), Finding),
        (recorded(own), Right),
        (recorded(by_index), Right),
        (recorded(sometimes), Unknown),
        (recorded(alike, whole), None),  # same-samples says what is wrong
        (recorded(alike, other_batches=True), None),
        (load(right), None),  # nothing is drawn
    ],
)
def test_equal_states_of_generators_are_found_where_samples_differ(recording, kind):
    said = [type(outcome) for outcome in randomness.check(recording)]
    assert said == ([] if kind is None else [kind])


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
    (outcome,) = randomness.check(by_ranks)
    assert isinstance(outcome, Finding)
    assert not [*randomness.check(moved_to_workers(recorded(alike), [1, 1]))]


class Drawing(Dataset):
    """A dataset that draws from what it is asked to."""

    def __init__(self, draw):
        self.own = random.Random(0)
        self.torch_own = torch.Generator()
        self.draw = draw

    def __getitem__(self, index):
        self.draw(self)
        return index


@pytest.mark.parametrize(
    ("draw", "changed"),
    [
        (lambda _: None, set()),
        (lambda _: random.random(), {"random"}),
        (lambda _: torch.rand(()), {"torch"}),
        (lambda _: numpy_random.rand(), {"numpy.random"}),
        (lambda data: data.own.random(), {"Drawing.own"}),
        (lambda data: torch.rand((), generator=data.torch_own), {"Drawing.torch_own"}),
    ],
)
def test_the_state_of_every_generator_tells_what_was_drawn(draw, changed):
    dataset = Subset(Drawing(draw), [3])
    before = probed._states(dataset)
    assert before == probed._states(dataset)  # looking draws nothing
    dataset[0]
    after = probed._states(dataset)
    assert {name for name in before if before[name] != after[name]} == changed
