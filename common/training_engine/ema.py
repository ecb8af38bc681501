"""The exponential moving average of a model's weights.

Call ``update`` after every optimiser step; evaluate ``module``.
"""

import copy

import torch
from torch import nn


class WeightAverage:
    """The moving average of ``model`` (never a wrapper), as a model of its own: ``module``.

    The average starts with the weights of the first update. After n updates its decay is
    min(``decay``, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage: a constant
    0.9999 would keep a tenth of the initial weights for 23,000 steps. It includes BatchNorm's
    running statistics, which must fit the averaged weights; integer buffers are copied. Unlike
    torch's AveragedModel it counts its ``updates`` on the host: that one copies the count to the
    GPU twice a step and waits for it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        self.updates, self._decay = 0, decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's weights and buffers; does not wait for a GPU."""
        averages, values = ([*one.parameters(), *one.buffers()] for one in (self.module, model))
        moved = [i for i, tensor in enumerate(averages) if tensor.is_floating_point()]
        copied = [i for i, tensor in enumerate(averages) if not tensor.is_floating_point()]
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        weight = 1 - decay if self.updates else 1.0
        torch._foreach_lerp_([averages[i] for i in moved], [values[i] for i in moved], weight)
        if copied:
            torch._foreach_copy_([averages[i] for i in copied], [values[i] for i in copied])
        self.updates += 1
