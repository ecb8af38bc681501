"""Lesson 2: each rank trains on a share of its own, from the same weights, and nothing is sent."""

import math
from collections.abc import Iterator
from unittest.mock import patch

from torch.utils.data import DistributedSampler

from lab.learn.student_file import Namespace, Say, StudentFile, Wrong

_SAMPLES, _EPOCHS, _GLOBAL_BATCH = 1797, 3, 64


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in (3, 2):
        shares, steps, starts, ends = zip(*student.on_ranks(size, _train_noted), strict=True)
        where = f"on {size} ranks"
        if {len(epochs) for epochs in shares} != {_EPOCHS}:
            raise Wrong(f"{where} each of 3 epochs should ask a DistributedSampler for samples")
        if unseen := _SAMPLES - len({sample for epochs in shares for sample in epochs[0]}):
            raise Wrong(
                f"{where} no rank sees {unseen:,} of the {_SAMPLES:,} samples in an epoch: every "
                "rank needs its own number, and the number of all, for a share of its own"
            )
        if shares[0][0] == shares[0][1]:
            raise Wrong("every epoch has the same order and the same shares: call set_epoch")
        expected = math.ceil(math.ceil(_SAMPLES / size) / (_GLOBAL_BATCH // size))
        if steps[0] != _EPOCHS * expected:
            raise Wrong(
                f"{where} an epoch takes {steps[0] / _EPOCHS:g} steps, and {expected} with a "
                f"global batch of {_GLOBAL_BATCH}: each rank's batch is its share of that"
            )
        if len(set(starts)) > 1:
            raise Wrong(f"{where} the weights begin with the sums {starts}: seed all ranks alike")
        say(f"{where} each sample comes to one rank an epoch, in a new order every time")
    say(f"equal at first, the ranks' weights end with the sums {ends}: nothing is averaged")
    return 100 * len(set().union(*shares[0])) / _SAMPLES


def _train_noted(student: Namespace) -> tuple[list[list[int]], int, float, float]:
    """Return each epoch's samples, the number of steps, and the weights' sums before and after."""
    epochs: list[list[int]] = []
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        epochs.append(list(samples_of(sampler)))
        return iter(epochs[-1])

    with patch.object(DistributedSampler, "__iter__", noted):
        first, (losses, last) = student["build_model"](), student["train"](_EPOCHS)
    sums = (sum(p.sum().item() for p in model.parameters()) for model in (first, last))
    start, end = (round(total, 4) for total in sums)
    return epochs, len(losses), start, end
