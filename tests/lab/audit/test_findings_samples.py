"""Findings about samples and notices, on records as the probe writes them.

``Script`` plays a script: which rank draws which indices of what. Each finding has numbers that
make it true, and numbers that nearly do.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.audit import findings
from lab.audit.findings import gradients, notices, run_checks, samples
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import RankRecords, Recording

OWN = {"sampler": "RandomSampler", "replicas": None}
SUBSET = OWN | {"sampler": "SubsetRandomSampler"}
PART = OWN | {"dataset": "Partition", "wraps": True, "inner_length": 960}


def distributed(length, rank, size, *, shuffle=True, seed=0, epoch=0):
    """Return what DistributedSampler gives a rank: padded from its own beginning."""
    order = list(range(length))
    if shuffle:
        random.Random(seed * 1000 + epoch).shuffle(order)
    order += order[: -length % size]
    return order[rank::size]


def shared_out(rank, epoch):
    """Return a right script's draws on 2 ranks."""
    return distributed(960, rank, 2, epoch=epoch)


def whole(rank, epoch):
    """Return the same draws of the whole dataset on every rank."""
    return distributed(960, 0, 1, epoch=epoch)


def half(rank, epoch):
    """Return draws of a dataset that each rank has cut in half for itself."""
    return distributed(480, 0, 1, epoch=epoch)


@dataclass
class Script:
    """A run of a script.

    Parameters
    ----------
    draws : draws(rank, epoch): outer indices of an epoch of a rank.
    inner : inner(rank, outer): the index in the innermost dataset, if the dataset wraps another.
    content : content(rank, inner): the hash of a sample as the script was given it.
    steps : of the first epoch before it is cut, and ``second`` of the second one.
    """

    draws: Callable[[int, int], Sequence[int]]
    facts: dict[str, Any] = field(default_factory=dict)
    inner: Callable[[int, int], Any] | None = None
    content: Callable[[int, int], Any] = lambda rank, inner: inner * 7919
    per_rank: Callable[[int], dict[str, Any]] = lambda rank: {}
    size: int = 2
    batch: int = 16
    steps: int = 6
    second: int = 2

    def recording(self, **facts):
        """Return the run's recording."""
        ranks = [RankRecords(100 + r, self._records(r), np.zeros(0), r) for r in range(self.size)]
        return Recording(self.size, ranks, **facts)

    def _records(self, rank):
        loader = {"k": "loader", "l": 0, "dataset": "CIFAR10", "length": 960}
        loader |= {"sampler": "DistributedSampler", "replicas": self.size, "wraps": False}
        loader["batches"] = -(-len(self.draws(rank, 0)) // self.batch)
        records = [loader | self.facts | self.per_rank(rank)]
        step = 0
        for epoch, steps in enumerate((self.steps, self.second)):
            draws, names = list(self.draws(rank, epoch)), {"l": 0, "epoch": epoch}
            batches = [draws[i : i + self.batch] for i in range(0, len(draws), self.batch)]
            given = batches[:steps]
            for b, indices in enumerate(given):
                inner = [self.inner(rank, one) for one in indices] if self.inner else indices
                contents = [self.content(rank, one) for one in inner]
                batch = {"k": "batch", **names, "b": b, "indices": indices, "contents": contents}
                batch["inner"] = inner if self.inner else None
                loss = {"value": 1.0, "reduction": "mean", "arriving": 1.0, "samples": None}
                backward = {"k": "backward", "step": step, "micro": 0, "loss": loss}
                backward["forwards"] = [[len(indices), None, "module", "Net"]]
                records += [batch, backward, {"k": "step", "o": 0, "step": step, "scale": 1}]
                step += 1
            cut = len(given) < len(batches)
            records.append({"k": "epoch", **names, "batches": len(given), "cut": cut})
            if cut:
                rest = [i for row in batches[len(given) :] for i in row]
                inner = [self.inner(rank, one) for one in rest] if self.inner else None
                records.append({"k": "rest", **names, "indices": rest, "inner": inner})
            if cut and epoch == 0:
                records.append({"k": "cut", "step": step, "why": "steps"})
        return records


def names(recording, check=samples.check):
    """Return the names of what a check finds."""
    return [one.name for one in check(recording) if isinstance(one, Finding)]


def texts(recording, kind, check=samples.check):
    """Return what a check says to be right, or unknown."""
    return "; ".join(one.text for one in check(recording) if isinstance(one, kind))


@pytest.mark.parametrize("size", [2, 3])
def test_a_distributed_sampler_is_right(size):
    """Each sample once, with another order in the second epoch; padding is a notice."""
    script = Script(lambda r, e: distributed(961, r, size, epoch=e), {"length": 961}, size=size)
    assert names(script.recording()) == ["padding-sampler"]
    said = texts(script.recording(), Right)
    assert "every rank trains on different samples" in said
    assert f"each epoch covers the dataset once (961 samples, {size - 1} padded)" in said
    assert "epoch 2 has a different order from epoch 1" in said


def reordered(rank, epoch):
    """Return the same batches on all ranks, but each batch in another order."""
    order = whole(rank, epoch)
    return [i for b in range(0, 960, 16) for i in order[b : b + 16][:: 1 - 2 * rank]]


def ranges(*parts):
    """Return a script whose ranks draw a range each, in random order."""

    def draws(rank, epoch):
        length = parts[rank][1] - parts[rank][0]
        return random.Random(rank).sample(range(length), length)

    facts = lambda r: {"length": parts[r][1] - parts[r][0]}  # noqa: E731
    return Script(draws, PART, lambda r, i: parts[r][0] + i, per_rank=facts, batch=32, second=0)


ORDERS = [random.Random(seed).sample(range(960), 960) for seed in range(2)]
KEPT = ORDERS[0][:768]
HELD = {"content": 5}
AUGMENTED = {"content": lambda rank, inner: (rank, inner)}
SAME, UNEVEN = ["same-samples"], ["uneven-coverage"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script(reordered, OWN), SAME),
        (Script(lambda r, e: distributed(960, min(r, 1), 3, epoch=e), size=3), SAME),
        # Augmentation changes what is given: what the datasets hold decides.
        (Script(whole, OWN | HELD, **AUGMENTED), SAME),
        (Script(whole, OWN, **AUGMENTED), []),
        (Script(whole, OWN, per_rank=lambda r: {"content": r}, **AUGMENTED), []),
        # Few different samples, such as constant images with their class, are equal by chance.
        (Script(whole, OWN, content=lambda r, i: i % 10), []),
        # Parts: outer indices are equal on all ranks, the inner ones are not.
        (Script(half, PART, inner=lambda r, i: ORDERS[r][480 * r + i]), UNEVEN),
        (Script(half, PART, **AUGMENTED), []),
        (Script(lambda r, e: list(range(10 * r, 960, 20)), SUBSET), []),  # every tenth sample
        # Each rank takes a Subset by hand: its range in random order.
        (ranges((0, 480), (480, 960)), []),
        (ranges((0, 440), (480, 920)), UNEVEN),  # a gap
        (ranges((0, 479), (480, 960)), []),  # one sample is left over
        (ranges((0, 400), (400, 800)), []),  # a limit may be meant
        (ranges((100, 500), (500, 900)), []),
        (Script(lambda r, e: KEPT[r::2], SUBSET), []),  # the others may be for validation
        # set_epoch() is never called; but one batch, or no shuffling, cannot tell.
        (Script(lambda r, e: distributed(960, r, 2), second=1), []),
        (Script(lambda r, e: distributed(960, r, 2, shuffle=False)), []),
        (Script(lambda r, e: distributed(960, r, 2), {"sampler": "LengthGroupedSampler"}), []),
    ],
)
def test_samples(script, expected):
    """Each way to divide a dataset, and those that are no fault."""
    assert names(script.recording()) == expected


def test_what_cannot_be_told_is_said():
    """Equal indices of data that nobody knows; repeated draws; the rest of an endless sampler."""
    assert "same data" in texts(Script(whole, OWN, **AUGMENTED).recording(), Unknown)
    drawn = Script(lambda r, e: random.Random(r + 10 * e).choices(range(960), k=480), OWN)
    assert "repeatedly" in texts(drawn.recording(), Unknown)
    endless = Script(shared_out).recording()
    for rank in endless.ranks:
        for record in rank.by_kind["rest"]:
            record["indices"] = None
    assert names(endless) == []
    assert "whole epoch" in texts(endless, Unknown)


@pytest.mark.parametrize("known", [8, None])
def test_slices_of_the_whole_batch_are_right(known):
    """All ranks load the same batch, and each trains on its own slice: 8 of 16 samples."""
    recording = Script(whole, OWN).recording(global_batch=16)
    for rank in recording.ranks:
        for backward in rank.by_kind["backward"]:
            backward["forwards"][0][0] = 8
            backward["loss"]["samples"] = known
    assert names(recording) == ([] if known else ["wrong-global-batch"])


def test_other_targets_are_not_the_same_samples():
    """Indices and contents are equal, but the losses were computed of other targets."""
    recording = Script(whole, OWN).recording()
    for rank in recording.ranks:
        for backward in rank.by_kind["backward"]:
            backward["forwards"][0][1] = 5
            backward["loss"]["target_hash"] = rank.rank
    assert names(recording) == []


def test_batch_counts_do_not_matter_where_the_loop_ends_in_step():
    """The script ends by itself after equally many steps."""
    recording = Script(lambda r, e: KEPT[:600] if r == 0 else KEPT[600:], SUBSET).recording()
    assert names(recording) == ["different-batch-counts"]
    for rank in recording.ranks:
        rank.records[:] = [one for one in rank.records if one["k"] != "cut"]
    assert "different-batch-counts" not in names(recording)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(32, []), (33, []), (31, []), (34, ["wrong-global-batch"]), (16, ["wrong-global-batch"])],
)
def test_global_batch(asked, expected):
    """16 samples on each of 2 ranks are 32; rounding a local batch is no fault."""
    assert names(Script(shared_out).recording(global_batch=asked)) == expected


def ranks_with(rows):
    """Return a recording of ranks with these records."""
    ranks = [RankRecords(r, list(row), np.zeros(0), r) for r, row in enumerate(rows)]
    return Recording(len(rows), ranks)


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        ([[1, 2, 3]] * 2, [[None] * 3] * 2, SAME),
        ([[1, 2, 3], [1, 2, 4]], [[None] * 3] * 2, []),
        ([[1, 2, 3]] * 2, [[5, 6, 7], [5, 6, 8]], []),
        ([[1, 1, 1]] * 2, [[None] * 3] * 2, []),  # constant: perhaps positions
        ([[1, 1, 1]] * 2, [[5, 5, 5]] * 2, SAME),
    ],
)
def test_without_a_loader_the_inputs_tell(inputs, targets, expected):
    """Equal inputs in all steps, and equal targets where they are known."""

    def record(step, one, target):
        forwards = [[8, one, "ddp", "Net"]]
        loss = {"target_hash": target}
        return {"k": "backward", "step": step, "micro": 0, "forwards": forwards, "loss": loss}

    rows = [
        [record(step, *both) for step, both in enumerate(zip(*rank, strict=True))]
        for rank in zip(inputs, targets, strict=True)
    ]
    assert names(ranks_with(rows)) == expected


def test_run_checks_merges_and_leaves_out_what_follows(monkeypatch):
    """Sizes are joined, consequences left out, and a check that fails is not checked."""

    def good(recording):
        yield Finding("own-gradient", (f"at {recording.size}",))
        yield Finding("weights-diverge", ("they do",))
        yield Right("one")
        yield Right("one")
        yield Right(f"three: {recording.size}")

    def bad(recording):
        yield Unknown("two")
        raise KeyError("o")

    parts = (
        SimpleNamespace(__name__="a.gradients", check=good),
        SimpleNamespace(__name__="a.weights", check=bad),
    )
    monkeypatch.setattr(findings, "CHECKS", parts)
    monkeypatch.setattr(notices, "compare", lambda recordings: [])
    monkeypatch.setattr(gradients, "resolve", lambda found, recordings: found)
    found, right, unknown = run_checks([Recording(2, []), Recording(3, [])])
    assert [(one.name, one.sizes) for one in found] == [("own-gradient", (2, 3))]
    assert found[0].evidence == ("at 2", "at 3")
    assert right == ["one", "three: 2 (on 2 ranks)", "three: 3 (on 3 ranks)"]
    assert unknown[0] == "two"
    assert "KeyError" in unknown[1]
