"""WideResNet (Zagoruyko & Komodakis, arXiv:1605.07146) for 32x32 images.

Residual blocks with BatchNorm and ReLU before each convolution: fewer layers than a ResNet, and
``width`` times as many channels.
"""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes.

    ``forward`` takes a tensor of shape (batch, channels_in, h, w) and returns one of shape
    (batch, channels_out, h / stride, w / stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        activated = F.relu(self.bn1(inputs))
        hidden = F.relu(self.bn2(self.conv1(activated)))
        residual = self.conv2(hidden)
        shortcut = inputs if self.shortcut is None else self.shortcut(activated)
        return residual + shortcut


class WideResNet(nn.Module):
    """Three stages at 32x32, 16x16 and 8x8, then the mean over the pixels and a linear layer.

    The stages have 16, 32 and 64 times ``width`` channels. ``forward`` takes images of shape
    (batch, 3, 32, 32) and returns logits of shape (batch, num_classes).

    Parameters
    ----------
    depth : convolutions along the main path, 6 n + 4.
    """

    def __init__(self, depth: int, width: int, num_classes: int = 100) -> None:
        super().__init__()
        blocks = (depth - 4) // 6  # of two convolutions, in each of three stages
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        layers = []
        channels = 16
        for narrow, first_stride in ((16, 1), (32, 2), (64, 2)):
            # The first block of a stage changes the number of channels; stride 2 halves the image.
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                layers.append(ResidualBlock(channels, narrow * width, stride))
                channels = narrow * width
        self.blocks = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.conv(images))  # (batch, 64 width, 8, 8)
        activated = F.relu(self.bn(features))
        return self.classifier(activated.mean(dim=(2, 3)))


# By depth and width; the argument is ``num_classes``. Parameters for 100 classes:
wide_resnet28_10 = partial(WideResNet, 28, 10)  # 36,536,884
wide_resnet16_4 = partial(WideResNet, 16, 4)  # 2,772,020
