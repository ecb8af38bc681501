"""Crop with padding 4, horizontal flip, normalisation and cutout: tensor code for a whole batch.

For the same offsets the result equals that of torchvision's ``RandomCrop(32, padding=4)``,
``RandomHorizontalFlip``, ``ToTensor`` and ``Normalize``, applied to one image at a time. A sample's
augmentation depends only on (seed, epoch, sample), so not on the number of ranks.

What an epoch draws is copied to the device once, for all samples. Augmenting a batch then reads
nothing back, so a GPU never waits for the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.sharding import AUGMENTATION_STREAM, CUTOUT_STREAM, FLIP_STREAM, stream_seed

PADDING = 4
_MIRRORED = {"random": 0.5, "none": 0.0}  # share of the images in an epoch


@dataclass(frozen=True)
class Draws:
    """What each of n samples gets: top, left : int64, 0 to 8, shape (n,); flip : bool, (n,)."""

    top: Tensor
    left: Tensor
    flip: Tensor


def _generator(seed: int, stream: int, *place: int) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(seed, stream, *place))


def draw(
    samples: int, *, seed: int, epoch: int, flip: str, device: torch.device | str = "cpu"
) -> Draws:
    """Draw the offsets (uniform) and the flips of all samples for an epoch, counted from 1.

    Parameters
    ----------
    flip : "random": each epoch mirrors another random half. "alternating" (Jordan, 2024,
        arXiv:2404.00498): the first epoch mirrors a random half, and each later epoch exactly those
        that the epoch before did not, so two epochs show every image both ways. "none": no flips.
    """
    # For the whole set at once, not for this rank's share: sample i gets draw i on any rank.
    generator = _generator(seed, AUGMENTATION_STREAM, epoch)
    offsets = torch.randint(0, 2 * PADDING + 1, (2, samples), generator=generator)
    if flip == "alternating":
        # Computed from the first epoch's flips, not from the last one's: a resumed run has none.
        first = torch.rand(samples, generator=_generator(seed, FLIP_STREAM)) < 0.5
        flips = first if epoch % 2 else ~first
    else:
        flips = torch.rand(samples, generator=generator) < _MIRRORED[flip]
    return Draws(offsets[0].to(device), offsets[1].to(device), flips.to(device))


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
        means = torch.tensor(mean, dtype=torch.float64)
        stds = torch.tensor(std, dtype=torch.float64)
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
        height = self._height + 2 * PADDING
        width = self._width + 2 * PADDING
        padded = images.new_zeros(n, height, width, channels)
        padded[:, PADDING:-PADDING, PADDING:-PADDING] = images
        # windows[i, top, left] is one crop, as h rows of w * 3 contiguous bytes. A view, no copy:
        # the strides of ``top`` and of the rows are the same, so all crops share their memory.
        offsets = 2 * PADDING + 1
        crop_row_bytes = self._width * channels
        padded_row_bytes = width * channels
        self._windows = padded.as_strided(
            (n, offsets, offsets, self._height, crop_row_bytes),
            (height * padded_row_bytes, padded_row_bytes, channels, padded_row_bytes, 1),
        )
        # (2, w * 3): where each byte of a row comes from, unflipped and flipped.
        columns = torch.arange(crop_row_bytes).view(self._width, channels)
        sources = torch.stack([columns.flatten(), columns.flip(0).flatten()])
        self._sources = sources.to(images.device)

    def __call__(self, ids: Tensor, draws: Draws) -> Tensor:
        """Return the crops of the samples ``ids``, flipped if drawn: uint8, (batch, h, w, 3)."""
        # One indexing operation cuts the whole batch: (batch, h, w * 3).
        crops = self._windows[ids, draws.top[ids], draws.left[ids]]
        # Every row is gathered, flipped or not: choosing the flipped images by their positions
        # would make the host wait until the GPU has counted them.
        sources = self._sources[draws.flip[ids].long()].unsqueeze(1)
        flipped = crops.gather(2, sources.expand_as(crops))
        return flipped.view(len(ids), self._height, self._width, 3)


def draw_centres(
    samples: int,
    *,
    height: int,
    width: int,
    seed: int,
    epoch: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw row and column of the centre of each sample's cutout: uniform, int64, (2, samples)."""
    generator = _generator(seed, CUTOUT_STREAM, epoch)
    rows = torch.randint(0, height, (samples,), generator=generator)
    columns = torch.randint(0, width, (samples,), generator=generator)
    return torch.stack([rows, columns]).to(device)


def cut_out(images: Tensor, centres: Tensor, *, size: int) -> None:
    """Set a square of each image to zero, in place (DeVries and Taylor, 2017, arXiv:1708.04552).

    The images are normalised, so zero is the mean colour. The parts of a square that lie outside
    its image are lost.

    Parameters
    ----------
    images : float tensor of shape (batch, 3, h, w).
    centres : rows and columns, of shape (2, batch).
    size : side of the square in pixels.
    """
    height, width = images.shape[2:]
    rows = _covered(height, centres[0], size)
    columns = _covered(width, centres[1], size)
    squares = rows[:, :, None] & columns[:, None, :]  # (batch, h, w), the same for all channels
    images.masked_fill_(squares.unsqueeze(1), 0)


def _covered(side: int, middles: Tensor, size: int) -> Tensor:
    """Return which pixels each square covers along an axis of ``side`` pixels: (batch, side)."""
    pixels = torch.arange(side, device=middles.device)
    first = middles[:, None] - size // 2
    return (pixels >= first) & (pixels < first + size)
