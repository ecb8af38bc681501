"""The exponential moving average of a model's weights, by torch.optim.swa_utils.

Call ``build_ema`` once and ``update_parameters`` after every optimiser step; evaluate ``.module``.
"""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


def warmed_up_decay(decay: float, updates: int) -> float:
    """Return min(decay, (1 + n) / (10 + n)) after n updates.

    TensorFlow's ExponentialMovingAverage does the same. A constant 0.9999 would keep a tenth of the
    initial weights for 23,000 steps.
    """
    return min(decay, (1 + updates) / (10 + updates))


def build_ema(model: nn.Module, decay: float) -> AveragedModel:
    """Return the moving average of ``model`` (never a wrapper).

    The average starts with the weights of the first update. It includes BatchNorm's running
    statistics, which must fit the averaged weights; integer buffers are copied.
    """

    def average(averages: Tensors, values: Tensors, _updates: Tensor | int) -> None:
        if averages[0].is_floating_point():
            # torch copies ``n_averaged`` to the GPU as ``_updates``; reading it would block.
            updates = int(averaged.n_averaged)
            torch._foreach_lerp_(averages, values, 1 - warmed_up_decay(decay, updates))
        else:
            torch._foreach_copy_(averages, values)

    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    return averaged.requires_grad_(False).eval()
