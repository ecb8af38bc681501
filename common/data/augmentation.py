"""Crop with padding 4, horizontal flip and normalisation as batched tensor code.

The same as torchvision's ``RandomCrop(32, padding=4)``, ``RandomHorizontalFlip``, ``ToTensor`` and ``Normalize`` for the
same offsets, but for a whole batch at once; and what a sample gets is a pure function of (seed, epoch, sample), so that
it does not depend on the number of ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.sharding import AUGMENTATION_STREAM, stream_seed

PADDING = 4


@dataclass(frozen=True)
class Draws:
    """What each sample of the set gets: top, left : int64 offsets from 0 to 8, shape (n,); flip : bool, shape (n,)."""

    top: Tensor
    left: Tensor
    flip: Tensor


def draw(
    samples: int, *, seed: int, epoch: int, flip: bool, device: torch.device | str = "cpu"
) -> Draws:
    """Draw offsets (uniform) and flips (one half, or none where ``flip`` is False) of every sample for one epoch."""
    generator = torch.Generator().manual_seed(stream_seed(seed, AUGMENTATION_STREAM, epoch))
    offsets = torch.randint(0, 2 * PADDING + 1, (2, samples), generator=generator)
    flips = torch.rand(samples, generator=generator) < 0.5
    return Draws(offsets[0].to(device), offsets[1].to(device), (flips & flip).to(device))


class Normaliser:
    """Turns bytes into floats: (value / 255 - mean) / std by channel.

    Called with images of shape (batch, h, w, 3), uint8, it returns float32 of shape (batch, 3, h, w) in channels_last
    strides.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        width: int,
        device: torch.device | str = "cpu",
    ) -> None:
        means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        # Repeated along a row, so that the arithmetic runs over long contiguous vectors, not over 3 channels.
        self._scale = (1 / (255 * stds)).float().repeat(width).to(device)
        self._shift = (-means / stds).float().repeat(width).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        batch, height, width, channels = images.shape
        rows = (
            images.reshape(batch, height, width * channels)
            .to(torch.float32)
            .mul_(self._scale)
            .add_(self._shift)
        )
        return rows.view(batch, height, width, channels).permute(0, 3, 1, 2)


class RandomCropFlip:
    """Padded images of a whole set, from which it cuts batches.

    Parameters
    ----------
    images : uint8 tensor of shape (n, h, w, 3).
    """

    def __init__(self, images: Tensor) -> None:
        n, self._height, self._width, channels = images.shape
        height, width = self._height + 2 * PADDING, self._width + 2 * PADDING
        padded = images.new_zeros(n, height, width, channels)
        padded[:, PADDING:-PADDING, PADDING:-PADDING] = images
        # windows[i, top, left] is one crop, as rows of contiguous bytes; a view, no copy.
        self._windows = padded.as_strided(
            (n, 2 * PADDING + 1, 2 * PADDING + 1, self._height, self._width * channels),
            (height * width * channels, width * channels, channels, width * channels, 1),
        )

    def __call__(self, ids: Tensor, draws: Draws) -> Tensor:
        """Return the crops of the samples ``ids``, flipped where drawn: uint8 of shape (batch, h, w, 3)."""
        crops = self._windows[ids, draws.top[ids], draws.left[ids]]
        crops = crops.view(len(ids), self._height, self._width, 3)
        mirrored = draws.flip[ids].nonzero().squeeze(1)
        crops[mirrored] = crops[mirrored].flip(2)
        return crops
