"""VGG with BatchNorm for 32x32 images (Simonyan & Zisserman, arXiv:1409.1556, configurations A, B, D and E).

Five poolings take 32x32 to 1x1, so the three fully connected layers of the original shrink to one of 512 -> classes,
as in the CS744 assignment.
"""

from collections.abc import Sequence

from torch import Tensor, nn

_STAGE_CHANNELS = (64, 128, 256, 512, 512)
_STAGE_CONVOLUTIONS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


class VGG(nn.Module):
    """Five stages of 3x3 convolutions with BatchNorm and ReLU, each with a pooling behind it, then one linear layer.

    ``forward`` takes images of shape (batch, 3, 32, 32) and returns logits of shape (batch, num_classes).

    Parameters
    ----------
    convolutions : how many there are in each stage.
    """

    def __init__(self, convolutions: Sequence[int], num_classes: int) -> None:
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
        # He et al., arXiv:1502.01852, as in torchvision's VGG. With PyTorch's default for convolutions, made for no
        # nonlinearity in particular, VGG-11 has learned half as much after 41 steps.
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None  # Conv2d's default
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def vgg11(num_classes: int = 10) -> VGG:
    """VGG-11 with BatchNorm: 9,231,114 parameters in 34 tensors for 10 classes."""
    return VGG(_STAGE_CONVOLUTIONS["vgg11"], num_classes)


def vgg13(num_classes: int = 10) -> VGG:
    """VGG-13 with BatchNorm."""
    return VGG(_STAGE_CONVOLUTIONS["vgg13"], num_classes)


def vgg16(num_classes: int = 10) -> VGG:
    """VGG-16 with BatchNorm."""
    return VGG(_STAGE_CONVOLUTIONS["vgg16"], num_classes)


def vgg19(num_classes: int = 10) -> VGG:
    """VGG-19 with BatchNorm."""
    return VGG(_STAGE_CONVOLUTIONS["vgg19"], num_classes)
