"""What the equivalence checks train: a ``Case`` of data and options, and a small network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

STEPS = 4
SAMPLES = (4, 3, 0, 2, 1, 5)
"""Sizes of uneven micro-batches, in turn; each step begins one entry later.

One micro-batch is empty, and one has a single sample.
"""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The largest relative difference that rounding explains, by type."""

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """What the ranks train, and how. The default includes all that a right strategy must handle.

    Parameters
    ----------
    uneven : shards differ in size, and in some steps a rank has no sample; otherwise every
        micro-batch has three samples.
    tied, frozen : two layers share a weight; one layer does not train.
    unused : no rank uses one layer, and only rank 0 uses another.
    batchnorm : a layer normalises over the samples of all ranks (SyncBatchNorm), as BatchNorm does
        in one process on the whole batch. With accumulation there is no such layer, since
        micro-batches rightly have statistics of their own.
    momentum, weight_decay : of SGD, whose learning rate is 0.1.
    accumulation_steps : micro-batches per optimiser step on each rank.
    clip_norm : largest allowed norm of all gradients together; None: no clipping.
    dtype : of parameters and images.
    channels_last : parameters are in channels_last memory format.
    device : of every rank and of the reference; ranks may share a GPU.
    """

    uneven: bool = True
    tied: bool = True
    frozen: bool = True
    unused: bool = True
    batchnorm: bool = True
    momentum: float = 0.9
    weight_decay: float = 0.01
    accumulation_steps: int = 1
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    device: str = "cpu"

    @property
    def tolerance(self) -> float:
        """The largest relative difference that rounding explains for this case's type."""
        return TOLERANCE[self.dtype]

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimiser of this case for ``model``."""
        return torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def shard_sizes(self, size: int) -> list[tuple[int, ...]]:
        """Return for each step the number of samples of every micro-batch, rank by rank."""
        count = size * self.accumulation_steps
        if not self.uneven:
            return [(3,) * count] * STEPS
        steps = []
        for step in range(STEPS):
            sizes = [SAMPLES[(part + step) % len(SAMPLES)] for part in range(count)]
            sizes[0] = max(1, sizes[0])  # its first sample uses the layer ``sometimes``
            steps.append(tuple(sizes))
        return steps

    def global_batches(self, size: int) -> list[list[MicroBatch]]:
        """Return for each step the micro-batches of all ranks, rank 0's first.

        A micro-batch is images of shape (n, 3, 8, 8) and labels of shape (n,). Rank 0 has the first
        sample of each step, the one that uses the layer ``sometimes``.
        """
        generator = torch.Generator().manual_seed(7)
        batches = []
        for shares in self.shard_sizes(size):
            images = torch.randn(sum(shares), 3, 8, 8, generator=generator, dtype=torch.float64)
            images[0, 0, 0, 0] = 9.0  # the mark of a sample that uses ``sometimes``
            labels = torch.randint(0, 4, (sum(shares),), generator=generator)
            images = images.to(self.device, self.dtype)
            labels = labels.to(self.device)
            batches.append(list(zip(images.split(shares), labels.split(shares), strict=True)))
        return batches


class ProofModel(nn.Module):
    """A small network with BatchNorm and the kinds of parameters that break wrong strategies.

    It maps (batch, 3, 8, 8) to (batch, 4).
    """

    def __init__(self, case: Case | None = None) -> None:
        super().__init__()
        case = case or Case()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        normalises = case.batchnorm and case.accumulation_steps == 1
        self.norm = nn.BatchNorm2d(6) if normalises else nn.Identity()
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(not case.frozen)
        self.square = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        if case.tied:
            self.tied.weight = self.square.weight
        self.unused = nn.Linear(3, 3) if case.unused else None
        self.sometimes = nn.Linear(6, 4) if case.unused else None
        self.head = nn.Linear(6, 4)
        self.to(case.device, case.dtype)
        if case.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = torch.tanh(self.norm(self.conv(images)))
        hidden = torch.tanh(self.frozen(hidden)).mean(dim=(2, 3))
        hidden = self.tied(torch.tanh(self.square(hidden)))
        outputs = self.head(hidden)
        marked = images[:, 0, 0, 0] > 5  # see ``Case.global_batches``
        if self.sometimes is not None and bool(marked.any()):
            outputs = outputs + self.sometimes(hidden) * marked[:, None]
        return outputs
