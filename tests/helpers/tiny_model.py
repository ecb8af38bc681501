"""Models for tests of processes, files and flags, where VGG-11 would only cost time.

They learn next to nothing. ``tests/__init__.py`` registers their names; only processes that tests
fork know these (``processes.py``).
"""

from torch import nn


def tiny(num_classes):
    """Return a model with BatchNorm and 1,530 parameters for ten classes."""
    return nn.Sequential(*_stem(), nn.Linear(128, num_classes))


def wide(num_classes):
    """Return a model with hardly any arithmetic and one gradient of 4 MB, which is slow to send."""
    return nn.Sequential(*_stem(), nn.Linear(128, 8192), nn.ReLU(), nn.Linear(8192, num_classes))


def _stem():
    return [
        nn.Conv2d(3, 8, 3, stride=4, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
    ]
