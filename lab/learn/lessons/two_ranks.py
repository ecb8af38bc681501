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


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in (3, 2):
        ranks = student.on_ranks(size, _train_noted, student.path, limit_seconds=90)
        problem = _problem(ranks) or ranks[0].problem
        if problem:
            raise Mistake(problem)
        say(f"on {size} ranks each sample comes to one rank an epoch, in a new order every time")
    ends = tuple(rank.end for rank in ranks)
    say(f"equal at first, the ranks' weights end with the sums {ends}: nothing is averaged")
    seen = set().union(*ranks[0].epochs)
    return 100 * len(seen) / _SAMPLES


class RankTraining(NamedTuple):
    """What a rank's training did.

    epochs : the samples of each, in their order.
    start, end : the sums of all weights.
    problem : what else is wrong, on any rank.
    """

    epochs: list[list[int]]
    steps: int
    start: float
    end: float
    problem: str | None


def _problem(ranks: Sequence[RankTraining]) -> str | None:
    """Return what is wrong with the ranks' samples, steps and weights; None if nothing is."""
    size = len(ranks)
    drawn: list[int] = []
    for rank in ranks:
        for first_epoch in rank.epochs[:1]:  # there is none if the rank uses no sampler
            drawn += first_epoch
    if not drawn or not ranks[0].steps:
        return ranks[0].problem
    different = len(set(drawn))
    if different < _SAMPLES or len(drawn) >= _SAMPLES + size:
        return told(
            "same-samples",
            "the ranks do not share the samples out",
            f"on {size} ranks they take {len(drawn)} samples in an epoch, {different} different "
            f"ones of {_SAMPLES}",
            "For a share of its own a rank needs its number, and how many ranks there are.",
        )
    epochs = ranks[0].epochs
    if epochs[:1] == epochs[1:2]:
        return told(
            "same-order",
            "every epoch has the same order and the same shares",
            f"on {size} ranks, rank 0's second epoch is its first",
            "Call loader.sampler.set_epoch(epoch) in each epoch, before its first batch.",
        )
    rank_samples = math.ceil(_SAMPLES / size)
    rank_batch = _GLOBAL_BATCH // size
    wanted = _EPOCHS * math.ceil(rank_samples / rank_batch)
    if ranks[0].steps != wanted:
        return told(
            "wrong-global-batch",
            "the global batch is wrong",
            f"{_EPOCHS} epochs take {ranks[0].steps} steps on {size} ranks, but {wanted} with a "
            f"global batch of {_GLOBAL_BATCH}",
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
    return None


def _train_noted(_names: Namespace, path: Path) -> RankTraining:
    """Run the program, and note the samples of each epoch."""
    epochs: list[list[int]] = []
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        epochs.append(list(samples_of(sampler)))
        return iter(epochs[-1])

    with patch.object(DistributedSampler, "__iter__", noted):
        recording = run_program(path)
    problem = judge_ranks(recording, global_batch=_GLOBAL_BATCH, averages=False)
    start = end = 0.0
    if recording.steps and recording.end is not None:
        start = _sum(recording.steps[0].start)
        end = _sum(recording.end)
    return RankTraining(epochs, recording.updates, start, end, problem)


def _sum(weights: Tensor) -> float:
    """Return the sum of all weights."""
    return round(float(weights.double().sum()), 4)
