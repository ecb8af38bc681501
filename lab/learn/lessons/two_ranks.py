"""Lesson 2: each rank trains on a share of its own, from the same weights, and nothing is sent."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest.mock import patch

from torch import nn
from torch.utils.data import DistributedSampler

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

_SAMPLES = 1797
_EPOCHS = 3
_GLOBAL_BATCH = 64


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in (3, 2):
        ranks = student.on_ranks(size, _train_noted, limit_seconds=90)
        problem = _problem(ranks)
        if problem:
            raise Mistake(f"on {size} ranks {problem}")
        say(f"on {size} ranks each sample comes to one rank an epoch, in a new order every time")
    ends = tuple(rank.end for rank in ranks)
    say(f"equal at first, the ranks' weights end with the sums {ends}: nothing is averaged")
    seen = set().union(*ranks[0].epochs)
    return 100 * len(seen) / _SAMPLES


class RankTraining(NamedTuple):
    """What a rank's training did.

    epochs : the samples of each, in their order.
    start, end : the sums of all weights.
    """

    epochs: list[list[int]]
    steps: int
    start: float
    end: float


def _problem(ranks: Sequence[RankTraining]) -> str | None:
    """Return what is wrong with a training; None if nothing is."""
    size = len(ranks)
    drawn: list[int] = []
    for rank in ranks:
        for first_epoch in rank.epochs[:1]:  # there is none if the rank uses no sampler
            drawn += first_epoch
    different = len(set(drawn))
    if different < _SAMPLES or len(drawn) >= _SAMPLES + size:
        return (
            f"the ranks take {len(drawn)} samples in an epoch, {different} different ones of "
            f"{_SAMPLES}: for a share of its own a rank needs its number, and how many there are"
        )
    epochs = ranks[0].epochs
    if epochs[:1] == epochs[1:2]:
        return "every epoch has the same order and the same shares: call set_epoch"
    rank_samples = math.ceil(_SAMPLES / size)
    rank_batch = _GLOBAL_BATCH // size
    wanted = _EPOCHS * math.ceil(rank_samples / rank_batch)
    if ranks[0].steps != wanted:
        return (
            f"{_EPOCHS} epochs take {ranks[0].steps} steps, but {wanted} with a global batch of "
            f"{_GLOBAL_BATCH}: a rank's batch is its share of that"
        )
    starts = tuple(rank.start for rank in ranks)
    if len(set(starts)) > 1:
        return f"the ranks' weights begin with the sums {starts}: seed all alike"
    return None


def _train_noted(student: Namespace) -> RankTraining:
    """Train, and note the samples of each epoch."""
    epochs: list[list[int]] = []
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        epochs.append(list(samples_of(sampler)))
        return iter(epochs[-1])

    with patch.object(DistributedSampler, "__iter__", noted):
        first = student["build_model"]()
        losses, last = student["train"](_EPOCHS)
    return RankTraining(epochs, len(losses), _sum(first), _sum(last))


def _sum(model: nn.Module) -> float:
    """Return the sum of all weights."""
    return round(sum(parameter.sum().item() for parameter in model.parameters()), 4)
