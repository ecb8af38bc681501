"""Crop with padding 4, horizontal flip and normalisation, as tensor code for a whole batch.

For the same offsets the result equals that of torchvision's ``RandomCrop(32, padding=4)``,
``RandomHorizontalFlip``, ``ToTensor`` and ``Normalize``, applied to one image at a time. A sample's
augmentation depends only on (seed, epoch, sample), so not on the number of ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.sharding import AUGMENTATION_STREAM, stream_seed

PADDING = 4


@dataclass(frozen=True)
class Draws:
    """What each of n samples gets: top, left : int64, 0 to 8, shape (n,); flip : bool, (n,)."""

    top: Tensor
    left: Tensor
    flip: Tensor


def draw(
    samples: int, *, seed: int, epoch: int, flip: bool, device: torch.device | str = "cpu"
) -> Draws:
    """Draw offsets (uniform) and flips (one half, or none if not ``flip``) of all samples."""
    # For the whole set at once, not for this rank's share: sample i gets draw i on any rank.
    generator = torch.Generator().manual_seed(stream_seed(seed, AUGMENTATION_STREAM, epoch))
    offsets = torch.randint(0, 2 * PADDING + 1, (2, samples), generator=generator)
    flips = torch.rand(samples, generator=generator) < 0.5
    return Draws(offsets[0].to(device), offsets[1].to(device), (flips & flip).to(device))


class Normaliser:
    """Turns bytes into floats: (value / 255 - mean) / std by channel.

    Called with images of shape (batch, h, w, 3), uint8, it returns float32 of shape
    (batch, 3, h, w) in channels_last strides.
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
        # (width * 3,): repeated along a row, so that the arithmetic runs over long contiguous
        # vectors in place of 3 channels. One multiplication and one addition replace the formula.
        self._scale = (1 / (255 * stds)).float().repeat(width).to(device)
        self._shift = (-means / stds).float().repeat(width).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        batch, height, width, channels = images.shape
        rows = images.reshape(batch, height, width * channels).to(torch.float32)
        rows.mul_(self._scale).add_(self._shift)
        # A view with channels first, whose memory still has channels last: no copy.
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
        # windows[i, top, left] is one crop, as h rows of w * 3 contiguous bytes. A view, no copy:
        # the strides of ``top`` and of the rows are the same, so all crops share their memory.
        self._windows = padded.as_strided(
            (n, 2 * PADDING + 1, 2 * PADDING + 1, self._height, self._width * channels),
            (height * width * channels, width * channels, channels, width * channels, 1),
        )

    def __call__(self, ids: Tensor, draws: Draws) -> Tensor:
        """Return the crops of the samples ``ids``, flipped if drawn: uint8, (batch, h, w, 3)."""
        # One indexing operation cuts the whole batch: (batch, h, w * 3).
        crops = self._windows[ids, draws.top[ids], draws.left[ids]]
        crops = crops.view(len(ids), self._height, self._width, 3)
        mirrored = draws.flip[ids].nonzero().squeeze(1)  # positions in the batch
        crops[mirrored] = crops[mirrored].flip(2)
        return crops
