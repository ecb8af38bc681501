"""ResNet (He et al., arXiv:1512.03385) for 32x32 images: torchvision's networks with another stem.

The stem is that of the CIFAR literature: one 3x3 convolution without stride and no pooling, so the
first stage still sees 32x32. As in torchvision, a bottleneck has its stride in its 3x3 convolution
("ResNet v1.5").
"""

from torch import nn
from torchvision.models import ResNet
from torchvision.models import resnet18 as torchvision_resnet18
from torchvision.models import resnet50 as torchvision_resnet50


def resnet18(num_classes: int = 10) -> ResNet:
    """Return ResNet-18 with the CIFAR stem: 11,173,962 parameters for 10 classes."""
    return _with_cifar_stem(torchvision_resnet18(num_classes=num_classes))


def resnet50(num_classes: int = 100) -> ResNet:
    """Return ResNet-50 with the CIFAR stem: 23,705,252 parameters for 100 classes."""
    return _with_cifar_stem(torchvision_resnet50(num_classes=num_classes))


def _with_cifar_stem(network: ResNet) -> ResNet:
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network
