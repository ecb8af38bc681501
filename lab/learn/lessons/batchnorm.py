"""Lesson 7: what BatchNorm computes on shards, and what "equal to one process" then means."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

VALUES, SHARDS = ([1.0, 3.0, 5.0, 11.0], [1.0, 3.0], [1.0, 1.001], [2.0, 2.0]), 4
_EQUAL = 1e-9


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 7; return what BatchNorm makes of the 3 on the rank with 1 and 3."""
    [found] = student.on_ranks(1, lambda names: [names["normalise"](list(v)) for v in VALUES])
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
        of_batch, *others = student.on_ranks(SHARDS, _compare_with_ranks, norm)[0]
        for shards, error in zip((1, SHARDS), others, strict=True):
            if not error <= _EQUAL:
                raise Mistake(
                    f"gradient_of_shards with shards={shards} differs by {error:.1e} from the mean "
                    f"gradient of {shards} rank{'s' * (shards > 1)} (1.0e+00: nothing was added): "
                    "change `gradient` itself, by each shard's part divided by `shards`"
                )
        say(
            f"{name} BatchNorm {SHARDS} ranks differ from {SHARDS} shards in turn by "
            f"{error:.0e}, from the whole batch by {of_batch:.0e}"
        )
    return found[1][1]


def _compare_with_ranks(student: Namespace, norm: bool) -> list[float]:
    """Return how far gradient_of_shards is from the gradients that real ranks compute.

    The whole batch from the ranks' mean, one shard from this rank's own, all shards from the mean.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    brightness = torch.linspace(0.2, 2, 32).reshape(-1, 1, 1, 1)  # so that the shards differ
    noise = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    images, labels = brightness * noise, torch.arange(32) % 10
    share = images.chunk(size)[rank], labels.chunk(size)[rank]

    def gradient(images: Tensor, labels: Tensor, shards: int) -> list[Tensor]:
        return student["gradient_of_shards"](student["build_model"](norm), images, labels, shards)

    model = student["build_model"](norm)
    cross_entropy(model(share[0]), share[1]).backward()
    own = torch.cat([one.grad.flatten() for one in model.parameters()])
    mean = own.clone()
    dist.all_reduce(mean)
    return [
        student["difference"](gradient(images, labels, 1), [mean / size]),
        student["difference"](gradient(*share, 1), [own]),
        student["difference"](gradient(images, labels, size), [mean / size]),
    ]
