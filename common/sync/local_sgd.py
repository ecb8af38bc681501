"""Local SGD: every rank trains by itself, and every H steps the ranks average their weights.

    rank 0   step step step step |mean| step step step step |mean|
    rank 1   step step step step |mean| step step step step |mean|      H = 4

It is lossy. What it keeps: between two averages each rank takes H steps of plain training on its
    own share. With H = 1 and SGD without momentum it equals ``all_reduce``. Each rank keeps its
    own optimiser state until ``sync_replicas`` averages it with the weights, before an evaluation
    or a checkpoint: a run that evaluates or saves more often averages more often.
Sends: every H steps every rank, rank 0 included, 2(N-1) messages, 2(N-1)/N M bytes, as a ring, and
    receives as much.
Time: (2(N-1) alpha + 2(N-1)/N M / B + (N-1)/N M gamma) / H per step. Every H steps, M bytes are
    copied in memory to a flat buffer and back. [Stich, arXiv:1805.09767]
Common mistake: evaluating or saving rank 0's weights between two averages: they are the weights
    of one rank, not of all. Another: averaging weights after every step instead of gradients, and
    calling it ``all_reduce``: each rank keeps its own momentum.

(N ranks, M bytes of weights; alpha seconds per message, B bytes per second on a link, gamma seconds
to add one byte.) Each dtype has its own message.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.utils.grouping import grouped


class LocalSGD(GradientSync):
    """No exchange of gradients; after every H-th step the mean of all weights."""

    exact = False
    equal_gradients = False
    _steps = 0
    _weights_differ = _state_differs = False  # between the ranks

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self._optimizer = optimizer
        return super().prepare(model, optimizer)

    def synchronize(self, model: nn.Module) -> None:
        """Send nothing, but give zeros to each parameter whose gradient only other ranks have.

        Then the optimisers of all ranks hold the same kind of state, which can be averaged.
        """
        self.gradients()

    def after_step(self, model: nn.Module) -> None:
        """See the base class."""
        self._steps += 1
        self._state_differs = True
        self._weights_differ = self._steps % self.plan.period != 0
        if not self._weights_differ:
            average([p.data for p in self._exchanged])

    def sync_replicas(self, model: nn.Module) -> None:
        """See the base class. A second call in a row changes nothing."""
        if not self._state_differs:
            return
        weights = [p.data for p in self._exchanged] if self._weights_differ else []
        state = [
            value
            for p in self._exchanged
            for _, value in sorted(self._optimizer.state.get(p, {}).items())
            # Momentum and similar state, but not step counters.
            if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
        ]
        average(weights + state)
        self._weights_differ = self._state_differs = False

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class."""
        self._steps = state.get("steps", 0)


@torch.no_grad()
def average(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, with one all_reduce for each dtype."""
    for alike in grouped((tensor.dtype, tensor) for tensor in tensors).values():
        flat = torch.cat([tensor.contiguous().view(-1) for tensor in alike]) / dist.get_world_size()
        dist.all_reduce(flat)
        means = flat.split([tensor.numel() for tensor in alike])
        for tensor, mean in zip(alike, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
