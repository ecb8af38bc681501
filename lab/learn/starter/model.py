"""VGG-11 with BatchNorm for images of 32x32 pixels (Simonyan & Zisserman, arXiv:1409.1556)."""

from torch import nn

CHANNELS = [64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"]


def VGG11(num_classes=10):
    """Return the network: 9,231,114 parameters in 34 tensors for 10 classes.

    It takes images of shape (batch, 3, 32, 32) and returns logits of shape (batch, num_classes).
    """
    layers = []
    arriving = 3
    for leaving in CHANNELS:
        if leaving == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            convolution = nn.Conv2d(arriving, leaving, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            layers += [convolution, nn.BatchNorm2d(leaving), nn.ReLU()]
            arriving = leaving
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(arriving, num_classes))
