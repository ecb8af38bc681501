"""Lesson 2: each rank trains on a share of its own, from the same weights, and nothing is sent."""

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.utils.data import DistributedSampler

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

_SAMPLES, _EPOCHS, _GLOBAL_BATCH = 1797, 3, 64


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in (3, 2):
        shares, steps, starts, ends = zip(
            *student.on_ranks(size, _train_noted, limit_seconds=90), strict=True
        )
        drawn = [sample for epochs in shares for epoch in epochs[:1] for sample in epoch]
        wanted = _EPOCHS * math.ceil(math.ceil(_SAMPLES / size) / (_GLOBAL_BATCH // size))
        problems = {
            f"the ranks take {len(drawn)} samples in an epoch, {len(set(drawn))} different ones of "
            f"{_SAMPLES}: for a share of its own a rank needs its number, and how many there are": (
                len(set(drawn)) < _SAMPLES or len(drawn) >= _SAMPLES + size
            ),
            "every epoch has the same order and the same shares: call set_epoch": shares[0][:1]
            == shares[0][1:2],
            f"{_EPOCHS} epochs take {steps[0]} steps, but {wanted} with a global batch of "
            f"{_GLOBAL_BATCH}: a rank's batch is its share of that": steps[0] != wanted,
            f"the ranks' weights begin with the sums {starts}: seed all alike": len(set(starts))
            > 1,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise Mistake(f"on {size} ranks {problem}")
        say(f"on {size} ranks each sample comes to one rank an epoch, in a new order every time")
    say(f"equal at first, the ranks' weights end with the sums {ends}: nothing is averaged")
    return 100 * len(set().union(*shares[0])) / _SAMPLES


def _train_noted(student: Namespace) -> tuple[Any, ...]:
    """Return each epoch's samples, the number of steps, and the weights' sums before and after."""
    epochs: list[list[int]] = []
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        epochs.append(list(samples_of(sampler)))
        return iter(epochs[-1])

    with patch.object(DistributedSampler, "__iter__", noted):
        first, (losses, last) = student["build_model"](), student["train"](_EPOCHS)
    sums = (sum(p.sum().item() for p in model.parameters()) for model in (first, last))
    return epochs, len(losses), *(round(total, 4) for total in sums)
