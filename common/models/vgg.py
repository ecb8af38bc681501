"""VGG with BatchNorm for 32x32 images (Simonyan & Zisserman, arXiv:1409.1556, configurations A, B, D and E).

Five poolings take 32x32 to 1x1, so the three fully connected layers of the original shrink to one of 512 -> classes,
as in the CS744 assignment.
"""

from torch import Tensor, nn

_POOL = "pool"
_LAYERS = {
    "vgg11": [64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL],
    "vgg13": [64, 64, _POOL, 128, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL],
    "vgg16": [
        64,
        64,
        _POOL,
        128,
        128,
        _POOL,
        *[256] * 3,
        _POOL,
        *[512] * 3,
        _POOL,
        *[512] * 3,
        _POOL,
    ],
    "vgg19": [
        64,
        64,
        _POOL,
        128,
        128,
        _POOL,
        *[256] * 4,
        _POOL,
        *[512] * 4,
        _POOL,
        *[512] * 4,
        _POOL,
    ],
}


class VGG(nn.Module):
    """Convolutions of 3x3 with BatchNorm and ReLU, then one linear layer.

    ``forward`` takes images of shape (batch, 3, 32, 32) and returns logits of shape (batch, num_classes).
    """

    def __init__(self, layers: list[int | str], num_classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for layer in layers:
            if layer == _POOL:
                blocks.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                blocks += [
                    nn.Conv2d(channels, layer, kernel_size=3, padding=1),
                    nn.BatchNorm2d(layer),
                    nn.ReLU(inplace=True),
                ]
                channels = layer
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)
        # He et al., arXiv:1502.01852, as in torchvision's VGG. With PyTorch's default for convolutions, made for no
        # nonlinearity in particular, VGG-11 has learned half as much after 41 steps.
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def vgg11(num_classes: int = 10) -> VGG:
    """VGG-11 with BatchNorm: 9,231,114 parameters in 34 tensors for 10 classes."""
    return VGG(_LAYERS["vgg11"], num_classes)


def vgg13(num_classes: int = 10) -> VGG:
    """VGG-13 with BatchNorm."""
    return VGG(_LAYERS["vgg13"], num_classes)


def vgg16(num_classes: int = 10) -> VGG:
    """VGG-16 with BatchNorm."""
    return VGG(_LAYERS["vgg16"], num_classes)


def vgg19(num_classes: int = 10) -> VGG:
    """VGG-19 with BatchNorm."""
    return VGG(_LAYERS["vgg19"], num_classes)
