"""What a dataset is here: two sets of images in memory as bytes, and how to normalise them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import UserError

IMAGE_SIZE = 32


@dataclass(frozen=True)
class ImageSet:
    """images : uint8 tensor of shape (n, 32, 32, 3); labels : int64 tensor of shape (n,), from 0."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def check(self, name: str, num_classes: int) -> None:
        """UserError where there is no sample, or a label lies outside the classes."""
        if len(self) == 0:
            raise UserError(f"{name} has no images")
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= num_classes:
            raise UserError(
                f"{name} has labels from {int(self.labels.min())} to {int(self.labels.max())}, but there "
                f"are {num_classes} classes"
            )


@dataclass(frozen=True)
class Dataset:
    """train, test : the two sets; class_names : by label; mean, std : of the training pixels by channel, in units of
    the full scale (0 to 1); flip : whether a mirrored image is still one of its class."""

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool = True

    def __post_init__(self) -> None:
        self.train.check(f"the training set of {self.name}", len(self.class_names))
        self.test.check(f"the test set of {self.name}", len(self.class_names))

    def normalised_as_imagenet(self) -> "Dataset":
        """The same images with ImageNet's mean and standard deviation, for networks that have learned with these."""
        return replace(self, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def pixel_statistics(
    images: Tensor,
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return mean and standard deviation by channel, in units of the full scale, of images (n, h, w, 3), uint8."""
    counts = torch.stack(
        [torch.bincount(images[..., c].reshape(-1), minlength=256) for c in range(3)]
    ).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = counts / counts.sum(dim=1, keepdim=True)
    mean = (shares * values).sum(dim=1)
    std = ((shares * values**2).sum(dim=1) - mean**2).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
