"""Lists of strategies, and models for tests that go through all strategies."""

import torch
from torch import nn

from common.sync import STRATEGIES, is_exact

DISTRIBUTED = [name for name in STRATEGIES if name != "none"]
EXACT = [name for name in DISTRIBUTED if is_exact(name)]
# Ranks may use different layers and numbers of micro-batches, which fsdp refuses.
ANY_LAYERS = [name for name in EXACT if name != "fsdp"]
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


class Mixed(nn.Module):
    """A model whose layers alternate between float32 and float64."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(3, 31), nn.Linear(31, 29), nn.Linear(29, 17), nn.Linear(17, 2)]
        )
        for layer in self.layers[1::2]:
            layer.double()

    def forward(self, images):
        hidden = images.mean(dim=(2, 3))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        return hidden


class Odd(nn.Module):
    """Sizes that no world size divides, a buffer, and a frozen layer of 6 entries.

    channels_last; PowerSGD compresses some of its matrices, but not all.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 37, 3, padding=1), nn.BatchNorm2d(37)
        self.hidden, self.head = nn.Linear(37, 61), nn.Linear(61, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        features = torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3))
        return self.frozen(self.head(torch.relu(self.hidden(features))))


class Deep(nn.Module):
    """Four layers of 1 MB each; (batch, 512) to (batch, 512)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])

    def forward(self, inputs):
        return self.layers(inputs)


class Switching(nn.Module):
    """A model that uses ``extra`` in some steps only."""

    def __init__(self):
        super().__init__()
        self.base, self.extra, self.use_extra = nn.Linear(4, 2), nn.Linear(4, 2), False

    def forward(self, inputs):
        return self.base(inputs) + (self.extra(inputs) if self.use_extra else 0)
