"""The exponential moving average of a model's weights.

Call ``update`` after every optimiser step; evaluate ``module``.
"""

import copy

import torch
from torch import Tensor, nn

from common.errors import UserError


class WeightAverage:
    """The moving average of ``model`` (never a wrapper), as a model of its own: ``module``.

    The average starts with the weights of the first update. After n updates its decay is
    min(``decay``, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage: a constant
    0.9999 would keep a tenth of the initial weights for 23,000 steps. It includes BatchNorm's
    running statistics, which must fit the averaged weights; integer buffers are copied. Unlike
    torch's AveragedModel it counts its ``updates`` on the host: that one copies the count to the
    GPU twice a step and waits for it.

    Raises UserError if ``decay`` is not between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UserError(f"ema_decay: got {decay}, give a number between 0 and 1")
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        self.updates = 0
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's weights and buffers; does not wait for a GPU."""
        averages: list[Tensor] = []  # each beside the value that it follows
        values: list[Tensor] = []
        whole_averages: list[Tensor] = []  # integers, which are copied
        whole_values: list[Tensor] = []
        for average, value in zip(_tensors(self.module), _tensors(model), strict=True):
            if average.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                whole_averages.append(average)
                whole_values.append(value)
        weight = 1.0
        if self.updates:
            weight = 1 - min(self._decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(averages, values, weight)
        if whole_averages:
            torch._foreach_copy_(whole_averages, whole_values)
        self.updates += 1


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
