"""Local SGD: every rank trains by itself, and every H steps the ranks average their weights."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.sync.message_plans import LocalSGDPlan


class LocalSGD(LocalSGDPlan, GradientSync):
    """No exchange of gradients; after every H-th step of the optimiser one ``all_reduce`` of all weights, divided by N.

    What it keeps: between two averages each rank takes H steps of plain training on its own share; with H = 1 and SGD
    without momentum it is ``all_reduce``. The optimiser's state stays each rank's own, until ``sync_replicas`` averages it with
    the weights before evaluation and checkpoint: a training that is evaluated or saved more often averages more often.
    With N ranks and M bytes of weights, per H steps, as a ring: every rank, the root too, sends 2(N-1) messages,
    2(N-1)/N M bytes, and receives as many.
    Time of a step, as a mean: (2(N-1) alpha + 2(N-1)/N M / B) / H (alpha: latency, B: bytes a second), and a copy of M bytes
    within memory to the flat buffer and back; weights stay where the optimiser and the model have them.

    Parameters
    ----------
    averaging_period : H, steps from one average to the next.
    """

    exact = False
    equal_gradients = False

    def __init__(self, *, averaging_period: int = 4) -> None:
        super().__init__(averaging_period=averaging_period)
        self._steps = self._since_average = self._since_replicas_equal = 0

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self._optimizer = optimizer
        return super().prepare(model, optimizer)

    def synchronize(self, model: nn.Module) -> None:
        """Send nothing; give zeros where other ranks have a gradient, so that all optimisers hold the same kind of state."""
        self._weights = self.exchanged()
        self.gradients()

    def after_step(self, model: nn.Module) -> None:
        """See the base class."""
        self._steps, self._since_average, self._since_replicas_equal = (
            self._steps + 1,
            self._since_average + 1,
            self._since_replicas_equal + 1,
        )
        if self._steps % self.period == 0:
            average([p.data for p in self._weights])
            self._since_average = 0

    def sync_replicas(self, model: nn.Module) -> None:
        """See the base class; twice in a row does what once does."""
        if self._since_replicas_equal:
            state = [
                value
                for p in self._weights
                for _, value in sorted(self._optimizer.state.get(p, {}).items())
                if isinstance(value, Tensor)
                and value.shape == p.shape
                and value.is_floating_point()
            ]
            average(([p.data for p in self._weights] if self._since_average else []) + state)
            self._since_average = self._since_replicas_equal = 0

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class."""
        self._steps = state.get("steps", 0)


@torch.no_grad()
def average(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, all of a type in one message."""
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == kind]
        flat = torch.cat([tensor.contiguous().view(-1) for tensor in alike]) / dist.get_world_size()
        dist.all_reduce(flat)
        for tensor, mean in zip(
            alike, flat.split([tensor.numel() for tensor in alike]), strict=True
        ):
            tensor.copy_(mean.view_as(tensor))
