"""Findings about samples, on records as the probe writes them.

Each finding has numbers that make it true, and numbers that nearly do.
"""

import random

import pytest
from msgspec.structs import replace

from lab.audit.findings import samples
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import Backward, Batch, Cut, Forward, Rest
from tests.lab.audit.recordings import LOSS, Rank, load

OWN = {"sampler": "RandomSampler", "replicas": None}
SUBSET = OWN | {"sampler": "SubsetRandomSampler"}
PART = OWN | {"dataset": "Partition", "wraps": True, "inner_length": 960}
KEPT = random.Random(0).sample(range(960), 768)


def distributed(length, size, *, part=lambda rank: rank, set_epoch=True):
    """Return what DistributedSampler gives a rank in an epoch: padded from its own beginning."""

    def draws(rank, epoch):
        order = random.Random(epoch if set_epoch else 0).sample(range(length), length)
        return (order + order[: -length % size])[part(rank) :: size]

    return draws


right = distributed(960, 2)
whole, half = (distributed(length, 1, part=lambda rank: 0) for length in (960, 480))
same_order = distributed(960, 2, set_epoch=False)


def reordered(rank, epoch):
    """Return the same batches on all ranks, but each batch in another order."""
    order = whole(rank, epoch)
    return [i for b in range(0, 960, 16) for i in order[b : b + 16][:: 1 - 2 * rank]]


def half_shared(rank, epoch):
    """Return batches of which every second sample is in all ranks' batches."""
    return [KEPT[i if i % 2 else i + 384 * rank] for i in range(384)]


def augmented(rank, index):
    return 1000 * rank + index  # another one on each rank


def ranges(*parts):
    """Return a recording of ranks that draw a range each, in random order."""

    def draws(rank, epoch):
        length = parts[rank][1] - parts[rank][0]
        return random.Random(rank).sample(range(length), length)

    facts = lambda rank: PART | {"length": parts[rank][1] - parts[rank][0]}  # noqa: E731
    return load(draws, facts, inner=lambda rank, i: parts[rank][0] + i, second=0)


def names(recording):
    return [one.name for one in samples.check(recording) if isinstance(one, Finding)]


def texts(recording, kind):
    return "; ".join(one.text for one in samples.check(recording) if isinstance(one, kind))


@pytest.mark.parametrize("size", [2, 3])
def test_a_distributed_sampler_is_right(size):
    recording = load(distributed(961, size), {"length": 961}, size=size)
    assert names(recording) == []
    said = texts(recording, Right)
    assert "every rank trains on different samples" in said
    assert f"each epoch covers the dataset once (961 samples, {size - 1} padded)" in said
    assert "epoch 2 has a different order from epoch 1" in said


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (load(reordered, OWN), ["same-samples"]),
        (load(distributed(960, 3, part=lambda rank: min(rank, 1)), size=3), ["same-samples"]),
        (load(half_shared, SUBSET), ["uneven-coverage"]),
        # Augmentation changes what is given: what the datasets hold decides.
        (load(whole, OWN | {"content": 5}, content=augmented), ["same-samples"]),
        (load(whole, OWN, content=augmented), []),
        (load(whole, lambda r: OWN | {"content": r}, content=augmented), []),
        # Few different samples, such as constant images with their class, are equal by chance.
        (load(whole, OWN, content=lambda rank, i: i % 10), []),
        (load(half, PART, content=augmented), []),
        (load(lambda r, e: list(range(10 * r, 960, 20)), SUBSET), []),  # every tenth sample
        # Each rank takes a Subset by hand: its range in random order.
        (ranges((0, 440), (480, 920)), ["uneven-coverage"]),  # a gap
        (ranges((0, 479), (480, 960)), []),  # one sample is left over
        (ranges((100, 500), (500, 900)), []),  # a limit may be meant
        (load(lambda r, e: KEPT[r::2], SUBSET), []),  # the others may be for validation
        # set_epoch() is never called; but one batch, or another sampler, cannot tell.
        (load(same_order, second=1), []),
        (load(same_order, {"sampler": "LengthGroupedSampler"}), []),
    ],
)
def test_samples(recording, expected):
    assert names(recording) == expected


def test_what_cannot_be_told_is_said():
    assert "same data" in texts(load(whole, OWN, content=augmented), Unknown)
    drawn = load(lambda r, e: random.Random(r + 10 * e).choices(range(960), k=480), OWN)
    assert "repeatedly" in texts(drawn, Unknown)
    endless = load(right)
    for rank in endless.ranks:
        for rest in rank.of(Rest):
            rest.indices = None
    assert names(endless) == []
    assert "whole epoch" in texts(endless, Unknown)


def with_losses(recording, forward, loss):
    """Return a recording whose models got other inputs, and whose losses say more."""
    for rank in recording.ranks:
        for backward in rank.of(Backward):
            backward.forwards = [Forward(*forward, "module")]
            backward.loss = replace(backward.loss, **loss(rank.rank))
    return recording


@pytest.mark.parametrize(
    ("recording", "asked", "expected"),
    [
        # All ranks load one batch, and each trains on its own slice: 8 of 16 samples.
        (with_losses(load(whole, OWN), [8, None], lambda rank: {"samples": 8}), 16, []),
        (with_losses(load(whole, OWN), [8, None], lambda rank: {}), 16, ["wrong-global-batch"]),
        # Indices and contents are equal, but the losses were computed of other targets.
        (with_losses(load(whole, OWN), [16, 5], lambda rank: {"target_hash": rank}), None, []),
        # 16 samples on each of 2 ranks are 32; rounding a local batch is no fault.
        (load(right), 32, []),
        (load(right), 33, []),
        (load(right), 31, []),
        (load(right), 34, ["wrong-global-batch"]),
        (load(right), 16, ["wrong-global-batch"]),
    ],
)
def test_losses_and_the_global_batch(recording, asked, expected):
    recording.global_batch = asked
    assert names(recording) == expected


def recording_of(records):
    """Return a recording of ranks with these records."""
    ranks = [RankRecords(rank, several, rank=rank) for rank, several in enumerate(records)]
    return Recording(len(ranks), ranks)


def test_batch_counts_do_not_matter_where_the_loop_ends_in_step():
    recording = load(lambda r, e: KEPT[600:] if r else KEPT[:600], SUBSET)
    assert names(recording) == ["different-batch-counts"]
    uncut = [
        [record for record in rank.records if not isinstance(record, Cut)]
        for rank in recording.ranks
    ]
    assert names(recording_of(uncut)) == []
    last = max(i for i, record in enumerate(uncut[1]) if isinstance(record, Batch))
    del uncut[1][last]  # now one rank has loaded a batch more
    assert names(recording_of(uncut)) == ["different-batch-counts"]


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        ([[1, 2, 3]] * 2, [[None] * 3] * 2, ["same-samples"]),
        ([[1, 2, 3], [1, 2, 4]], [[None] * 3] * 2, []),
        ([[1, 2, 3]] * 2, [[5, 6, 7], [5, 6, 8]], []),
        ([[1, 1, 1]] * 2, [[None] * 3] * 2, []),  # constant: perhaps positions
        ([[1, 1, 1]] * 2, [[5, 5, 5]] * 2, ["same-samples"]),
    ],
)
def test_without_a_loader_the_inputs_tell(inputs, targets, expected):
    ranks = [Rank(0), Rank(1)]
    for one in ranks:
        hashes = zip(inputs[one.rank], targets[one.rank], strict=True)
        for step, (given, target) in enumerate(hashes):
            loss, forwards = LOSS | {"target_hash": target}, [[8, given, "ddp"]]
            one.record("backward", step=step, micro=0, forwards=forwards, loss=loss)
    assert names(Recording(2, ranks)) == expected


def test_equal_contents_under_other_indices_are_not_called_different_samples():
    """As where each rank shuffles its list before the sampler divides it."""
    shuffled = [random.Random(rank).sample(range(960), 960) for rank in range(2)]
    steps = {"content": lambda rank, index: shuffled[rank][index], "second": 2}
    of_own = load(right, lambda rank: {"content": rank}, **steps)
    for recording in (load(right, **steps), of_own):
        assert "different samples" not in texts(recording, Right)
        assert "equal content" in texts(recording, Unknown)
