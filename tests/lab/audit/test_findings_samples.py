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
from lab.audit.findings import notices, run_checks, samples
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import RankRecords, Record, Recording

LABELS = random.Random(7).choices(range(10), k=4000)


def distributed(
    length: int, rank: int, size: int, *, shuffle: bool = True, seed: int = 0, epoch: int = 0
) -> list[int]:
    """Return what DistributedSampler gives a rank: padded from its own beginning."""
    order = list(range(length))
    if shuffle:
        random.Random(seed * 1000 + epoch).shuffle(order)
    order += order[: -length % size]
    return order[rank::size]


@dataclass
class Script:
    """A run of a script.

    Parameters
    ----------
    draws : draws(rank, epoch): outer indices of an epoch of a rank.
    inner : inner(rank, outer): the index in the innermost dataset.
    label, digest : label(rank, inner), digest(rank, inner): of an item.
    steps : of the first epoch before it is cut, and ``second`` of the second one.
    """

    draws: Callable[[int, int], Sequence[int]]
    size: int = 2
    batch: int = 16
    steps: int = 6
    second: int = 2
    length: int = 960
    inner: Callable[[int, int], Any] = lambda rank, outer: outer
    label: Callable[[int, int], Any] = lambda rank, inner: LABELS[inner]
    digest: Callable[[int, int], Any] = lambda rank, inner: inner * 7919
    facts: dict[str, Any] = field(default_factory=dict)
    per_rank: Callable[[int], dict[str, Any]] = lambda rank: {}
    micro: int = 1
    arriving: float = 1.0
    evaluates: bool = False

    def recording(self, **facts: Any) -> Recording:
        """Return the run's recording."""
        ranks = [RankRecords(100 + r, self._records(r), np.zeros(0), r) for r in range(self.size)]
        return Recording(self.size, ranks, **facts)

    def _records(self, rank: int) -> list[Record]:
        draws = list(self.draws(rank, 0))
        loader = {
            "k": "loader",
            "l": 0,
            "dataset": "CIFAR10",
            "length": self.length,
            "batch_size": self.batch,
            "batches": -(-len(draws) // self.batch),
            "sampler": "DistributedSampler",
            "replicas": self.size,
        }
        records: list[Record] = [loader | self.facts | self.per_rank(rank)]
        step = 0
        for epoch, steps in enumerate((self.steps, self.second)):
            draws = list(self.draws(rank, epoch))
            batches = [draws[i : i + self.batch] for i in range(0, len(draws), self.batch)]
            given = batches[: steps * self.micro]
            for b, indices in enumerate(given):
                records += self._batch(rank, epoch, b, indices, step, b % self.micro)
                if (b + 1) % self.micro == 0:
                    records.append({"k": "step", "o": 0, "step": step, "scale": 1})
                    step += 1
            cut = len(given) < len(batches)
            records.append(
                {"k": "epoch", "l": 0, "epoch": epoch, "batches": len(given), "cut": cut}
            )
            if cut:
                rest = [i for row in batches[len(given) :] for i in row]
                records.append({"k": "rest", "l": 0, "epoch": epoch, "indices": rest})
            if cut and epoch == 0:
                records.append({"k": "cut", "step": step, "why": "steps"})
        return records

    def _batch(
        self, rank: int, epoch: int, b: int, indices: list[int], step: int, micro: int
    ) -> list[Record]:
        rows = []
        for outer in indices:
            inner = self.inner(rank, outer)
            rows.append([outer, inner, self.label(rank, inner), self.digest(rank, inner)])
        loss = {"value": 1.0, "reduction": "mean", "arriving": self.arriving, "samples": None}
        return [
            {"k": "items", "l": 0, "rows": rows},
            {"k": "batch", "l": 0, "epoch": epoch, "b": b, "indices": indices},
            {
                "k": "backward",
                "step": step,
                "micro": micro,
                "forwards": [[len(indices), None, "module", "Net"]],
                "loss": loss,
            },
        ]


def names(recording: Recording, check: Any = samples.check) -> list[str]:
    """Return the names of what a check finds."""
    return [one.name for one in check(recording) if isinstance(one, Finding)]


def texts(recording: Recording, kind: type, check: Any = samples.check) -> list[str]:
    """Return what a check says to be right, or unknown."""
    return [one.text for one in check(recording) if isinstance(one, kind)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_distributed_sampler_is_right(size: int) -> None:
    """Each sample once, with another order in the second epoch; padding is said to be."""
    script = Script(lambda r, e: distributed(961, r, size, epoch=e), size=size, length=961)
    recording = script.recording()
    assert names(recording) == []
    padded = ", 1 padded" if size == 2 else ", 2 padded"
    said = texts(recording, Right)
    assert "every rank trains on different samples" in said
    assert f"each epoch covers the dataset once (961 samples{padded})" in said
    assert "epoch 2 has a different order from epoch 1" in said
    assert names(recording, notices.check) == ["padding-sampler"]


def test_same_samples() -> None:
    """No sampler and one seed; also in another order within the batch."""

    def reordered(rank: int, epoch: int) -> list[int]:
        order = distributed(960, 0, 1, epoch=epoch)
        return [i for b in range(0, 960, 16) for i in order[b : b + 16][:: 1 - 2 * rank]]

    facts = {"sampler": "RandomSampler", "replicas": None}
    same = Script(lambda r, e: distributed(960, 0, 1, epoch=e), facts=facts)
    assert names(same.recording()) == ["same-samples"]
    assert names(Script(reordered, facts=facts).recording()) == ["same-samples"]


def test_same_samples_of_three_ranks_name_the_ranks() -> None:
    """Ranks 1 and 2 share theirs."""
    script = Script(lambda r, e: distributed(960, min(r, 1), 3, epoch=e), size=3)
    found = [one for one in samples.check(script.recording()) if isinstance(one, Finding)]
    assert [one.name for one in found] == ["same-samples"]
    assert "ranks 1 and 2" in found[0].evidence[0]


def test_augmented_samples_are_the_same_by_their_labels() -> None:
    """Hashes differ under augmentation; labels in random order tell."""
    script = Script(
        lambda r, e: distributed(960, 0, 1, epoch=e),
        digest=lambda r, i: (r, i),
    )
    assert names(script.recording()) == ["same-samples"]


def test_slices_of_the_whole_batch_are_right() -> None:
    """All ranks load the same batch, and each trains on its own slice: 8 of 16 samples."""
    same = Script(
        lambda r, e: distributed(960, 0, 1, epoch=e),
        facts={"sampler": "RandomSampler", "replicas": None},
    )
    for known in (8, None):
        recording = same.recording(global_batch=16)
        for rank in recording.ranks:
            for backward in rank.by_kind["backward"]:
                backward["forwards"][0][0] = 8
                backward["loss"]["samples"] = known
        expected = [] if known else ["wrong-global-batch"]
        assert names(recording) == expected


def test_other_targets_are_not_the_same_samples() -> None:
    """Indices and labels are equal, but the losses were computed of other targets."""
    recording = Script(lambda r, e: distributed(960, 0, 1, epoch=e)).recording()
    for rank in recording.ranks:
        for backward in rank.by_kind["backward"]:
            backward["forwards"][0][1] = 5
            backward["loss"]["target_hash"] = rank.rank
    assert names(recording) == []


@pytest.mark.parametrize(
    "label",
    [
        lambda r, i: LABELS[i + 960 * r],  # another part of one dataset
        lambda r, i: None,
        lambda r, i: i % 10,
        lambda r, i: i // 96,
        lambda r, i: 0,
    ],
)
def test_equal_indices_of_different_data_are_right(label: Any) -> None:
    """Each rank has sliced its arrays: the indices are equal, and so may regular labels be."""
    script = Script(
        lambda r, e: distributed(960, 0, 1, epoch=e),
        label=label,
        digest=lambda r, i: i + 960 * r,
        facts={"sampler": "RandomSampler", "replicas": None},
    )
    assert names(script.recording()) == []


def test_parts_of_one_dataset_are_right() -> None:
    """Outer indices are equal on all ranks, the inner ones are not (Subset, DataPartitioner)."""
    order = random.Random(3).sample(range(960), 960)
    script = Script(
        lambda r, e: distributed(480, 0, 1, epoch=e),
        inner=lambda r, outer: order[480 * r + outer],
        length=480,
        facts={"dataset": "Partition", "sampler": "RandomSampler", "replicas": None},
    )
    assert names(script.recording()) == []
    assert "every rank trains on different samples" in texts(script.recording(), Right)


def test_parts_drawn_with_different_seeds_overlap() -> None:
    """Each rank shuffles for itself before it takes its part; seen in the first batches."""
    orders = [random.Random(seed).sample(range(960), 960) for seed in range(2)]
    script = Script(
        lambda r, e: distributed(480, 0, 1, epoch=e),
        inner=lambda r, outer: orders[r][480 * r + outer],
        length=480,
        facts={"dataset": "Partition", "sampler": "RandomSampler", "replicas": None},
    )
    assert names(script.recording()) == ["uneven-coverage"]


def test_whole_dataset_on_each_rank_with_different_seeds() -> None:
    """Every sample comes twice in an epoch, though no batch is the same."""
    script = Script(
        lambda r, e: distributed(960, 0, 1, seed=r, epoch=e),
        facts={"sampler": "RandomSampler", "replicas": None},
    )
    found = [one for one in samples.check(script.recording()) if isinstance(one, Finding)]
    assert [one.name for one in found] == ["uneven-coverage"]
    assert "every rank draws the same 960 samples" in found[0].evidence[0]


def test_replacement_is_no_fault() -> None:
    """A weighted sampler draws samples repeatedly, on each rank and on several."""
    script = Script(
        lambda r, e: random.Random(r + 10 * e).choices(range(960), k=480),
        facts={"sampler": "WeightedRandomSampler", "replicas": None},
    )
    assert names(script.recording()) == []
    assert any("repeatedly" in text for text in texts(script.recording(), Unknown))


def part(start: int, stop: int) -> list[int]:
    """Return a range in random order."""
    return random.Random(start).sample(range(start, stop), stop - start)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 480), (480, 960)], []),
        ([(0, 480), (470, 950)], ["uneven-coverage"]),  # overlap
        ([(0, 440), (480, 920)], ["uneven-coverage"]),  # a gap
        ([(0, 479), (480, 960)], []),  # one sample is left over
        ([(0, 400), (400, 800)], []),  # a limit may be meant
        ([(100, 500), (500, 900)], []),
    ],
)
def test_ranges(ranges: list[tuple[int, int]], expected: list[str]) -> None:
    """Each rank takes a Subset by hand: its range in random order."""
    script = Script(
        lambda r, e: part(0, ranges[r][1] - ranges[r][0]),
        inner=lambda r, outer: ranges[r][0] + outer,
        batch=32,
        second=0,
        facts={"dataset": "Subset", "sampler": "RandomSampler", "replicas": None},
        per_rank=lambda r: {"length": ranges[r][1] - ranges[r][0]},
    )
    assert names(script.recording()) == expected


def test_more_replicas_than_ranks() -> None:
    """A literal num_replicas=4 on two ranks leaves half of the dataset out."""
    script = Script(lambda r, e: distributed(960, r, 4, epoch=e), facts={"replicas": 4})
    found = [one for one in samples.check(script.recording()) if isinstance(one, Finding)]
    assert [one.name for one in found] == ["uneven-coverage"]
    assert "480 of 960" in found[0].evidence[0]


def test_every_fourth_sample_on_two_ranks() -> None:
    """indices[rank::4] leaves half out; a strided subset that is shared out does not."""
    facts = {"sampler": "SubsetRandomSampler", "replicas": None}
    literal = Script(lambda r, e: list(range(r, 960, 4)), facts=facts)
    subset = Script(lambda r, e: list(range(10 * r, 960, 20)), facts=facts)
    assert names(literal.recording()) == ["uneven-coverage"]
    assert names(subset.recording()) == []


def test_a_validation_split_is_no_fault() -> None:
    """SubsetRandomSampler with a part of the indices, shared out among the ranks."""
    kept = random.Random(5).sample(range(960), 768)
    script = Script(
        lambda r, e: kept[r::2], facts={"sampler": "SubsetRandomSampler", "replicas": None}
    )
    assert "uneven-coverage" not in names(script.recording())


def test_unknown_rest_is_not_checked() -> None:
    """Prefetched batches are missing in the rest: the epoch is not whole."""
    script = Script(lambda r, e: distributed(960, r, 2, epoch=e))
    recording = script.recording()
    for rank in recording.ranks:
        for record in rank.by_kind["rest"]:
            record["indices"] = record["indices"][64:]
    assert names(recording) == []
    assert any("whole epoch" in text for text in texts(recording, Unknown))


def test_same_order() -> None:
    """set_epoch is never called; one batch, or no shuffling, cannot tell."""
    fixed = Script(lambda r, e: distributed(960, r, 2))
    assert names(fixed.recording()) == ["same-order"]
    assert names(Script(fixed.draws, second=1).recording()) == []
    plain = Script(lambda r, e: distributed(960, r, 2, shuffle=False))
    assert names(plain.recording()) == []
    assert names(plain.recording(), notices.check) == ["no-shuffling"]
    own = Script(fixed.draws, facts={"sampler": "LengthGroupedSampler"})
    assert names(own.recording()) == []
    partly = Script(lambda r, e: distributed(960, r, 2, epoch=e * r))
    assert "same-order" not in names(partly.recording())


def test_different_batch_counts() -> None:
    """Parts of 0.7 and 0.3; not where the script ends by itself after equally many steps."""
    script = Script(
        lambda r, e: part(0, 672) if r == 0 else part(672, 960),
        facts={"sampler": "SubsetRandomSampler", "replicas": None},
    )
    assert names(script.recording()) == ["different-batch-counts"]
    recording = script.recording()
    for rank in recording.ranks:
        rank.records[:] = [one for one in rank.records if one["k"] != "cut"]
    assert "different-batch-counts" not in names(recording)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(32, []), (33, []), (31, []), (34, ["wrong-global-batch"]), (16, ["wrong-global-batch"])],
)
def test_global_batch(asked: int, expected: list[str]) -> None:
    """16 samples on each of 2 ranks are 32; rounding a local batch is no fault."""
    script = Script(lambda r, e: distributed(960, r, 2, epoch=e))
    assert names(script.recording(global_batch=asked)) == expected


def inputs(hashes: Sequence[Sequence[object]], targets: Sequence[Sequence[object]]) -> Recording:
    """Return a recording without loaders: [rank][backward] hashes of inputs and targets."""
    ranks = []
    for rank, (row, wanted) in enumerate(zip(hashes, targets, strict=True)):
        records: list[Record] = [
            {
                "k": "backward",
                "step": step,
                "micro": 0,
                "forwards": [[8, one, "ddp", "Net"]],
                "loss": {"target_hash": target},
            }
            for step, (one, target) in enumerate(zip(row, wanted, strict=True))
        ]
        ranks.append(RankRecords(rank, records, np.zeros(0), rank))
    return Recording(len(ranks), ranks)


def test_without_a_loader_the_inputs_tell() -> None:
    """Equal inputs in all steps, and equal targets where they are known."""
    none = [[None] * 3] * 2
    assert names(inputs([[1, 2, 3]] * 2, none)) == ["same-samples"]
    assert names(inputs([[1, 2, 3], [1, 2, 4]], none)) == []
    assert names(inputs([[1, 2, 3]] * 2, [[5, 6, 7], [5, 6, 8]])) == []
    assert names(inputs([[1, 1, 1]] * 2, none)) == []  # constant: perhaps positions
    assert names(inputs([[1, 1, 1]] * 2, [[5, 5, 5]] * 2)) == ["same-samples"]


def test_evaluation_loaders_are_not_checked() -> None:
    """All ranks evaluate on the same samples, with gradients on."""
    recording = Script(lambda r, e: distributed(960, r, 2, epoch=e)).recording()
    for rank in recording.ranks:
        rank.records.append(rank.records[0] | {"l": 1, "replicas": None})
        rows = [[i, i, LABELS[i], i] for i in range(32)]
        rank.records.append({"k": "items", "l": 1, "rows": rows})
        for b in range(2):
            indices = list(range(16 * b, 16 * b + 16))
            rank.records.append({"k": "batch", "l": 1, "epoch": 0, "b": b, "indices": indices})
    assert names(recording) == []


def test_batchnorm_statistics() -> None:
    """Buffers at the same step differ; equal ones, and one rank alone, say nothing."""

    def recording(*means: float) -> Recording:
        ranks = []
        for rank, mean in enumerate(means):
            buffers = [["bn.running_mean", [mean, 2.0]]]
            record = {"k": "eval", "step": 6, "buffers": buffers, "batchnorm": 1}
            ranks.append(RankRecords(rank, [record], np.zeros(0), rank))
        return Recording(2, ranks)

    assert names(recording(1.0, 1.1), notices.check) == ["batchnorm-statistics"]
    assert names(recording(1.0, 1.0), notices.check) == []
    assert names(recording(1.0), notices.check) == []


def test_equal_dropout() -> None:
    """All ranks have the same random state in at least two steps."""

    def recording(rows: list[list[int]]) -> Recording:
        ranks = []
        for rank, row in enumerate(rows):
            records: list[Record] = [
                {"k": "random", "step": step, "hash": one} for step, one in enumerate(row)
            ]
            ranks.append(RankRecords(rank, records, np.zeros(0), rank))
        return Recording(len(rows), ranks)

    assert names(recording([[1, 2], [1, 2]]), notices.check) == ["equal-dropout"]
    assert names(recording([[1, 2], [1, 3]]), notices.check) == []
    assert names(recording([[1], [1]]), notices.check) == []
    assert names(recording([[1, 2], [1, 2], [1, 3]]), notices.check) == []


def test_summed_accumulation() -> None:
    """Two micro-batches whose means count fully; half of each is right."""
    draws = lambda r, e: distributed(960, r, 2, epoch=e)  # noqa: E731
    full = Script(draws, micro=2, steps=3)
    assert names(full.recording(), notices.check) == ["summed-accumulation"]
    assert names(Script(draws, micro=2, steps=3, arriving=0.5).recording(), notices.check) == []
    assert names(Script(draws).recording(), notices.check) == []


def test_needless_communication() -> None:
    """Gradients are exchanged in each micro-batch, by hand or by DDP."""
    script = Script(lambda r, e: distributed(960, r, 2, epoch=e), micro=2, steps=3, arriving=0.5)

    def recording(each: bool) -> Recording:
        made = script.recording()
        for rank in made.ranks:
            last = [one for one in rank.records if one["k"] == "backward" and one["micro"] == 1]
            for place in range(len(rank.records) - 1, -1, -1):
                one = rank.records[place]
                if one["k"] == "backward" and (each or one in last):
                    rank.records.insert(place + 1, {"k": "call", "content": "gradient"})
        return made

    assert names(recording(each=True), notices.check) == ["needless-communication"]
    assert names(recording(each=False), notices.check) == []


def test_batch_grows() -> None:
    """16 samples on each rank at both sizes; 24 and 16 are one global batch."""

    def run(size: int, batch: int) -> Recording:
        return Script(
            lambda r, e: distributed(960, r, size, epoch=e), size=size, batch=batch
        ).recording()

    (found,) = notices.compare([run(2, 16), run(3, 16)])
    assert found.name == "batch-grows"
    assert found.sizes == (2, 3)
    assert "32 with 2 ranks and 48 with 3 ranks" in found.evidence[0]
    assert list(notices.compare([run(2, 24), run(3, 16)])) == []
    assert list(notices.compare([run(2, 16)])) == []


def test_run_checks_merges_and_leaves_out_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are joined, consequences left out, and a check that fails is not checked."""

    def good(recording: Recording) -> Any:
        yield Finding("own-gradient", (f"at {recording.size}",))
        yield Finding("weights-diverge", ("they do",))
        yield Right("one")
        yield Right("one")
        yield Right(f"three: {recording.size}")

    def bad(recording: Recording) -> Any:
        yield Unknown("two")
        raise KeyError("o")

    parts = (
        SimpleNamespace(__name__="a.gradients", check=good),
        SimpleNamespace(__name__="a.weights", check=bad),
    )
    monkeypatch.setattr(findings, "CHECKS", parts)
    monkeypatch.setattr(notices, "compare", lambda recordings: [])
    monkeypatch.setattr(findings, "resolve", lambda found, recordings: found)
    found, right, unknown = run_checks([Recording(2, []), Recording(3, [])])
    assert [(one.name, one.sizes) for one in found] == [("own-gradient", (2, 3))]
    assert found[0].evidence == ("at 2", "at 3")
    assert right == ["one", "three: 2 (on 2 ranks)", "three: 3 (on 3 ranks)"]
    assert unknown[0] == "two"
    assert "KeyError" in unknown[1]
