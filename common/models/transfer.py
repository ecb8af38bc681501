"""torchvision's ResNet-18, trained on ImageNet, with a new last layer.

The network has learned from images of 224x224 pixels, normalised with ImageNet's statistics. So
``forward`` enlarges small images, and ``--normalise imagenet`` makes the loaders normalise alike.
"""

import hashlib
import io
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet18_Weights
from torchvision.models import resnet18 as torchvision_resnet18

from common.errors import UserError, first_line, reason_of
from common.tensor_archive import read_archive
from common.utils.atomic_files import read_regular

_MOST_BYTES = 2**29  # ResNet-18 has 47 MB
_ADVICE = (
    "Copy the file from another machine and give --pretrained-weights FILE. Training does not "
    "start from random weights"
)


class Transfer(nn.Module):
    """A pretrained network behind a bilinear resize.

    ``forward`` takes images of shape (batch, 3, h, w) and returns logits, (batch, num_classes).

    Parameters
    ----------
    input_size : the height and width to which images are resized.
    """

    def __init__(self, network: nn.Module, *, input_size: int) -> None:
        super().__init__()
        self.network, self.input_size = network, input_size

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self.input_size, self.input_size):
            images = F.interpolate(
                images,
                size=(self.input_size, self.input_size),
                mode="bilinear",
                align_corners=False,
            )
        return self.network(images)


def resnet18_transfer(
    num_classes: int = 10, *, input_size: int = 224, unfreeze: bool = False
) -> Transfer:
    """Return ResNet-18 with the ImageNet stem; ``load_pretrained`` adds the pretrained weights.

    11,181,642 parameters for 10 classes. The last layer's 5,130 train; with ``unfreeze``, all do.
    """
    network = torchvision_resnet18(num_classes=num_classes)
    if not unfreeze:
        network.requires_grad_(False)
        network.fc.requires_grad_(True)
    return Transfer(network, input_size=input_size)


def load_pretrained(model: Transfer, source: str | None) -> str:
    """Load weights trained on ImageNet into all layers but the last; return where they come from.

    Parameters
    ----------
    source : a file, or a URL of one, with a state dict of torchvision's ResNet-18; None:
        torchvision's own download, which torch keeps in its cache.

    Raises UserError if they cannot be read or do not fit.
    """
    where = source or ResNet18_Weights.IMAGENET1K_V1.url
    state = _read(source, where)
    own = model.network.state_dict()
    wanted = {name for name in own if not name.startswith("fc.")}
    # torchvision's older files lack BatchNorm's counters; torch accepts such files.
    given = {name: own[name] for name in wanted if name.endswith(".num_batches_tracked")}
    if isinstance(state, dict):
        given |= {str(name).removeprefix("module."): value for name, value in state.items()}
    if any(getattr(given.get(name), "shape", None) != own[name].shape for name in wanted):
        raise UserError(
            f"--pretrained-weights: {where} holds no state dict of torchvision's ResNet-18: give "
            "one as saved by "
            "torch.save(torchvision.models.resnet18(weights='DEFAULT').state_dict(), FILE)"
        )
    try:
        model.network.load_state_dict(own | {name: given[name] for name in wanted})
    except Exception as error:  # tensors without data, sparse or quantised ones
        raise UserError(
            f"--pretrained-weights: {where} holds weights that cannot be copied "
            f"({first_line(error)[:100]}): copy the file again"
        ) from error
    return where


def _read(source: str | None, where: str) -> Any:
    cached = Path(torch.hub.get_dir(), "checkpoints", where.rpartition("/")[2])
    # torch's cache knows a file by its name alone, but two URLs may end alike.
    if source is not None:
        cached = cached.with_name(f"{hashlib.sha256(where.encode()).hexdigest()[:16]}.pth")
    try:
        if source is not None and "://" not in source:
            content = read_regular(Path(source), most_bytes=_MOST_BYTES)
            if content.startswith(b"PK"):
                return read_archive(content)
            # torchvision's own files are of the format before torch 1.6.
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return torch.hub.load_state_dict_from_url(
            where,
            map_location="cpu",
            progress=False,
            weights_only=True,
            check_hash=source is None,
            file_name=cached.name,
        )
    except UserError as error:  # not a regular file, or too large
        raise UserError(f"{error}. {_ADVICE}") from error
    except (
        URLError,
        TimeoutError,
        ConnectionError,
        FileNotFoundError,
        PermissionError,
        IsADirectoryError,
    ) as error:
        raise UserError(
            f"the pretrained weights could not be loaded from {where} ({reason_of(error)}). "
            f"{_ADVICE}"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        if "://" in where:
            cached.unlink(missing_ok=True)
        raise UserError(
            f"--pretrained-weights: {where} cannot be read as a file of weights "
            f"({first_line(error)[:100]}): copy it again"
        ) from error
