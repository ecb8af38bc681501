"""A dataset: two sets of images in memory as bytes, and how to normalise them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

IMAGE_SIZE = 32


@dataclass(frozen=True)
class ImageSet:
    """images : uint8 tensor of shape (n, 32, 32, 3); labels : int64 of shape (n,), from 0."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def image_set(images: np.ndarray, labels: Sequence[int] | np.ndarray) -> ImageSet:
    """Return numpy's images, uint8 of shape (n, 32, 32, 3), with their labels as tensors."""
    return ImageSet(torch.from_numpy(images), torch.as_tensor(labels, dtype=torch.int64))


@dataclass(frozen=True)
class Dataset:
    """Images and labels to train and test with.

    Parameters
    ----------
    class_names : by label.
    mean, std : of the training pixels by channel, in units of the full scale (0 to 1).
    flip : whether a mirrored image is still one of its class.
    """

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool = True

    def normalised_as_imagenet(self) -> "Dataset":
        """Return this dataset with ImageNet's mean and deviation, for pretrained models."""
        return replace(self, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def pixel_statistics(
    images: Tensor,
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return mean and standard deviation by channel, in units of the full scale (0 to 1).

    ``images`` : uint8 tensor of shape (n, h, w, 3).
    """
    # Counting the 256 values is exact, and needs no copy of the images as floats.
    channels = [images[..., channel].reshape(-1) for channel in range(3)]
    counts = torch.stack([torch.bincount(pixels, minlength=256) for pixels in channels]).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = counts / counts.sum(dim=1, keepdim=True)
    mean = (shares * values).sum(dim=1)
    variance = (shares * values**2).sum(dim=1) - mean**2
    std = variance.clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
