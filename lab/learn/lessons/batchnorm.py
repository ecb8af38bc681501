"""Lesson 7: what BatchNorm computes on shards, and what "equal to one process" then means."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

VALUES, SHARDS = [1.0, 3.0, 5.0, 11.0], 4
_EQUAL = 1e-9


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 7; return what BatchNorm makes of the 3 on the rank with 1 and 3."""
    [[whole, shard]] = student.on_ranks(
        1, lambda names: [names["normalise"](values) for values in (VALUES, VALUES[:2])]
    )
    if not np.allclose(whole, _normal(VALUES), atol=1e-4):
        raise Mistake(
            f"normalise({VALUES}) is {np.round(whole, 3).tolist()}, BatchNorm makes "
            f"{_normal(VALUES).round(3).tolist()}: (value - mean) / sqrt(variance + 1e-5), and the "
            "variance divides by the number of values, not by one less"
        )
    say("normalise is what BatchNorm does in training")
    for name, norm in (("without", False), ("with", True)):
        of_batch, of_shards = student.on_ranks(SHARDS, _compare_with_ranks, norm)[0]
        if not of_shards <= _EQUAL:  # NaN if the function returns zeros
            raise Mistake(
                f"{SHARDS} shards' gradient differs from {SHARDS} ranks' by {of_shards:.1e}: "
                "add up the shards' gradients, each divided by the number of shards"
            )
        say(
            f"{name} BatchNorm {SHARDS} ranks differ from {SHARDS} shards in turn by "
            f"{of_shards:.0e}, from the whole batch by {of_batch:.0e}"
        )
    return shard[1]


def _compare_with_ranks(student: Namespace, norm: bool) -> list[float]:
    """Return how far real ranks' mean gradient is from the whole batch's, and from the shards'."""
    rank, size = dist.get_rank(), dist.get_world_size()
    noise = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    images = noise * torch.linspace(0.2, 2, 32).reshape(-1, 1, 1, 1)  # so that the shards differ
    labels = torch.arange(32) % 10

    def gradient(images: Tensor, labels: Tensor, shards: int) -> list[Tensor]:
        return student["gradient_of_shards"](student["build_model"](norm), images, labels, shards)

    means = gradient(images.chunk(size)[rank], labels.chunk(size)[rank], 1)
    for mean in means:
        dist.all_reduce(mean)
        mean /= size
    return [student["difference"](gradient(images, labels, n), means) for n in (1, size)]


def _normal(values: Sequence[float]) -> NDArray:
    return (np.array(values) - np.mean(values)) / np.std(values)
