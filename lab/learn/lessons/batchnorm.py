"""Lesson 7: what BatchNorm computes on shards, and what "equal to one process" then means."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from lab.learn.student_file import Namespace, Say, StudentFile, Wrong
from lab.plot_style import SECTIONS, grid

VALUES, SHARDS = [1.0, 3.0, 5.0, 11.0], 4
_EQUAL = 1e-9


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 7; return what BatchNorm makes of the 3 on the rank with 1 and 3."""
    [[whole, shard]] = student.on_ranks(1, _normalise)
    true = nn.functional.batch_norm(torch.tensor([VALUES]).T, None, None, training=True)
    if not torch.allclose(torch.tensor(whole), true.flatten(), atol=1e-4):
        raise Wrong(
            f"normalise({VALUES}) is {[round(one, 3) for one in whole]}, BatchNorm says "
            f"{[round(one, 3) for one in true.flatten().tolist()]}: (value - mean) / sqrt(variance "
            "+ 1e-5); divide the squares by their number, not by one less"
        )
    say("normalise is what BatchNorm does in training")
    for norm in (False, True):
        of_batch, of_shards = student.on_ranks(SHARDS, _compare_with_ranks, norm)[0]
        if of_shards > _EQUAL:
            raise Wrong(
                f"the gradient of {SHARDS} shards differs from that of {SHARDS} ranks by "
                f"{of_shards:.1e}: is it the mean of the shards' gradients, each divided by the "
                "number of shards once?"
            )
        say(
            f"{'with' if norm else 'without'} BatchNorm {SHARDS} ranks differ from {SHARDS} shards "
            f"in turn by {of_shards:.0e}, and from the whole batch by {of_batch:.0e}"
        )
    return shard[1]


def _normalise(student: Namespace) -> list[list[float]]:
    return [student["normalise"](values) for values in (VALUES, VALUES[:2])]


def _compare_with_ranks(student: Namespace, norm: bool) -> list[float]:
    """Return how far real ranks' mean gradient is from the whole batch's, and from the shards'."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 8, 8, generator=generator).double()
    labels = torch.randint(10, (32,), generator=generator)
    rank, size = dist.get_rank(), dist.get_world_size()
    means = _gradient(student, norm, images.chunk(size)[rank], labels.chunk(size)[rank])
    for mean in means:
        dist.all_reduce(mean)
        mean /= size
    shards = student["gradient_of_shards"](student["build_model"](norm), images, labels, size)
    whole = _gradient(student, norm, images, labels)
    return [student["difference"](some, means) for some in (whole, shards)]


def _gradient(student: Namespace, norm: bool, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
    model = student["build_model"](norm)
    loss = nn.functional.cross_entropy(model(images), labels)
    return torch.autograd.grad(loss, list(model.parameters()))


def draw() -> Figure:
    """Draw four numbers, and what BatchNorm makes of them in one process and on two ranks."""
    figure, [axis] = grid(1, narrow=False, columns=1, height=2.6)
    rows = {
        "one process: 1, 3, 5, 11": VALUES,
        "rank 0: 1, 3": VALUES[:2],
        "rank 1: 5, 11": VALUES[2:],
    }
    for height, values in enumerate(rows.values()):
        normal = (np.array(values) - np.mean(values)) / np.std(values)
        axis.plot(normal, [height] * len(values), "o", color=SECTIONS["forward"], markersize=9)
        for value, at in zip(values, normal, strict=True):
            axis.annotate(f"{value:g} becomes {at:.2f}", (at, height + 0.38), ha="center")
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set(ylim=(2.6, -0.4), xlim=(-1.7, 2), xlabel="after BatchNorm")
    axis.grid(axis="x")
    return figure
