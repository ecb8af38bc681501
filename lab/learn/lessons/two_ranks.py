"""Lesson 2: each rank trains on a share of its own, from the same weights, and nothing is sent."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.utils.data import DistributedSampler

from lab.learn.causes import told
from lab.learn.program import run_program
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.learn.verdict import judge_ranks

_SAMPLES = 1797
_EPOCHS = 3
_GLOBAL_BATCH = 64
_SIZES = (3, 5, 2)  # the last is the question's


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in _SIZES:
        ranks = student.on_ranks(size, _train_noted, student.path, limit_seconds=90)
        problem = _problem(ranks) or ranks[0].problem
        if problem:
            raise Mistake(problem)
        say(
            f"on {size} ranks all {_SAMPLES:,} samples are shared out in each of {_EPOCHS} epochs, "
            "and each rank takes its share in a new order"
        )
    ends = tuple(rank.end for rank in ranks)
    say(f"equal at first, the ranks' weights end with the sums {ends}: no rank has sent anything")
    seen = set().union(*ranks[0].epochs)
    return 100 * len(seen) / _SAMPLES


class RankTraining(NamedTuple):
    """What a rank's training did.

    epochs : the samples of each, in their order.
    start, end : the sums of all weights.
    kinds : of all that it sent.
    problem : what else is wrong, on any rank.
    """

    epochs: list[list[int]]
    steps: int
    start: float
    end: float
    kinds: set[str]
    problem: str | None


def _problem(ranks: Sequence[RankTraining]) -> str | None:
    """Return what is wrong with the ranks' samples, steps and weights; None if nothing is."""
    size = len(ranks)
    if not any(rank.epochs for rank in ranks) or not ranks[0].steps:
        return ranks[0].problem or (
            f"on {size} ranks no DistributedSampler gives out samples: pass one to DataLoader, as "
            "sampler"
        )
    problem = _wrong_shares(ranks) or _wrong_order(ranks)
    if problem:
        return problem
    rank_samples = math.ceil(_SAMPLES / size)
    rank_batch = _GLOBAL_BATCH // size
    wanted = _EPOCHS * math.ceil(rank_samples / rank_batch)
    for number, rank in enumerate(ranks):
        if rank.steps != wanted:
            return told(
                "wrong-global-batch",
                "the global batch is wrong",
                f"{_EPOCHS} epochs take {rank.steps} steps on {size} ranks, but {wanted} with a "
                f"global batch of {_GLOBAL_BATCH} (seen on rank {number})",
                "A rank's batch is its share of that.",
            )
    starts = tuple(rank.start for rank in ranks)
    if len(set(starts)) > 1:
        return told(
            "different-start",
            "the ranks start from different weights",
            f"the ranks' weights begin with the sums {starts}",
            "Seed all alike.",
        )
    return _messages(ranks)


def _wrong_shares(ranks: Sequence[RankTraining]) -> str | None:
    """Say in which epoch the ranks' shares are not all samples, each once."""
    size = len(ranks)
    for epoch in range(_EPOCHS):
        drawn = [sample for rank in ranks for share in rank.epochs[epoch:][:1] for sample in share]
        different = len(set(drawn))
        if different == _SAMPLES and len(drawn) < _SAMPLES + size:
            continue
        cure = "For a share of its own a rank needs its number, and how many ranks there are."
        if epoch:
            cure = "Before each epoch, every rank must give set_epoch the same number, the epoch's."
        return told(
            "uneven-coverage" if epoch else "same-samples",
            "the ranks do not share the samples out",
            f"on {size} ranks they take {len(drawn)} samples in epoch {epoch + 1}, {different} "
            f"different ones of {_SAMPLES}",
            cure,
        )
    return None


def _wrong_order(ranks: Sequence[RankTraining]) -> str | None:
    """Say which rank has an epoch's order again."""
    for number, rank in enumerate(ranks):
        for epoch, order in enumerate(rank.epochs):
            earlier = rank.epochs[:epoch]
            if order in earlier:
                return told(
                    "same-order",
                    "an epoch has the same order and the same shares as an earlier one",
                    f"on {len(ranks)} ranks, rank {number}'s epoch {epoch + 1} is its epoch "
                    f"{earlier.index(order) + 1}",
                    "On every rank call loader.sampler.set_epoch(epoch) in each epoch, before its "
                    "first batch.",
                )
    return None


def _messages(ranks: Sequence[RankTraining]) -> str | None:
    """Say which rank has sent anything; here none does."""
    for number, rank in enumerate(ranks):
        if rank.kinds:
            return (
                f"on {len(ranks)} ranks, rank {number} calls {', '.join(sorted(rank.kinds))}. The "
                "ranks of this lesson send nothing; lesson 3 averages"
            )
    return None


def _train_noted(_names: Namespace, path: Path) -> RankTraining:
    """Run the program, and note the samples of each epoch."""
    begun: list[list[int]] = []
    complete: list[list[int]] = []  # not one that was left early, as to look at a batch
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        order = list(samples_of(sampler))
        begun.append(order)
        yield from order
        complete.append(order)

    with patch.object(DistributedSampler, "__iter__", noted):
        recording = run_program(path)
    problem = judge_ranks(recording, global_batch=_GLOBAL_BATCH, averages=False)
    start = end = 0.0
    if recording.steps and recording.end is not None:
        start = _sum(recording.steps[0].start)
        end = _sum(recording.end)
    epochs = complete or begun
    return RankTraining(epochs, recording.updates, start, end, recording.kinds, problem)


def _sum(weights: Tensor) -> float:
    """Return the sum of all weights."""
    return round(float(weights.double().sum()), 4)
