"""Lesson 7: what BatchNorm computes on shards, and what "equal to one process" then means."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.errors import count
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

VALUES = ([1.0, 3.0, 5.0, 11.0], [1.0, 3.0], [1.0, 1.001], [2.0, 2.0])
SHARDS = 4
_EQUAL = 1e-9


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 7; return what BatchNorm makes of the 3 on the rank with 1 and 3."""
    [found] = student.on_ranks(1, _normalise)
    for values, own in zip(VALUES, found, strict=True):
        true = (np.array(values) - np.mean(values)) / np.sqrt(np.var(values) + 1e-5)
        if not np.allclose(own, true, atol=1e-4):
            raise Mistake(
                f"normalise({values}) is {np.round(own, 3).tolist()}, BatchNorm makes "
                f"{true.round(3).tolist()}: (value - mean) / sqrt(variance + 1e-5), and the "
                "variance divides by the number of values, not by one less"
            )
    say("normalise is what BatchNorm does in training")
    for name, norm in (("without", False), ("with", True)):
        differences, *_ = student.on_ranks(SHARDS, _compare_with_ranks, norm)
        for shards, error in ((1, differences.one_shard), (SHARDS, differences.shards)):
            if not error <= _EQUAL:
                raise Mistake(
                    f"gradient_of_shards with shards={shards} differs by {error:.1e} from the mean "
                    f"gradient of {count(shards, 'rank')} (1.0e+00: nothing was added): change "
                    "`gradient` itself, by each shard's part divided by `shards`"
                )
        say(
            f"{name} BatchNorm {SHARDS} ranks differ from {SHARDS} shards in turn by "
            f"{differences.shards:.0e}, from the whole batch by {differences.batch:.0e}"
        )
    _, of_1_and_3, *_ = found
    return of_1_and_3[1]


def _normalise(student: Namespace) -> list[list[float]]:
    """Return what the student's BatchNorm makes of each of VALUES."""
    return [student.call("normalise", list(values)) for values in VALUES]


class Differences(NamedTuple):
    """How far gradient_of_shards is from the gradients that real ranks compute.

    batch : the whole batch from the ranks' mean.
    one_shard : one shard from this rank's own.
    shards : all shards from the ranks' mean.
    """

    batch: float
    one_shard: float
    shards: float


def _compare_with_ranks(student: Namespace, norm: bool) -> Differences:
    """Compute gradients on the ranks and in shards, with or without BatchNorm."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    brightness = torch.linspace(0.2, 2, 32).reshape(-1, 1, 1, 1)  # so that the shards differ
    noise = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    images = brightness * noise
    labels = torch.arange(32) % 10
    own_images = images.chunk(size)[rank]
    own_labels = labels.chunk(size)[rank]

    def gradient(images: Tensor, labels: Tensor, shards: int) -> list[Tensor]:
        return student["gradient_of_shards"](student["build_model"](norm), images, labels, shards)

    model = student["build_model"](norm)
    cross_entropy(model(own_images), own_labels).backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    mean = own.clone()
    dist.all_reduce(mean)
    mean /= size
    difference = student["difference"]
    return Differences(
        batch=difference(gradient(images, labels, 1), [mean]),
        one_shard=difference(gradient(own_images, own_labels, 1), [own]),
        shards=difference(gradient(images, labels, size), [mean]),
    )
