"""torchvision's ResNet-18, trained on ImageNet, with a new last layer.

The network has learned from images of 224x224 pixels, normalised with ImageNet's statistics. So
``forward`` enlarges small images, and ``--normalise imagenet`` makes the loaders normalise alike.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet18_Weights
from torchvision.models import resnet18 as torchvision_resnet18

from common.checkpoint import read_saved
from common.errors import UserError, first_line, reason_of
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
        self.network = network
        self.input_size = input_size

    def forward(self, images: Tensor) -> Tensor:
        large = F.interpolate(images, size=self.input_size, mode="bilinear")
        return self.network(large)


def resnet18_transfer(
    num_classes: int = 10, *, input_size: int = 224, unfreeze: bool = False
) -> Transfer:
    """Return ResNet-18 with the ImageNet stem; ``load_pretrained`` adds the pretrained weights.

    11,181,642 parameters for 10 classes. The last layer's 5,130 train; with ``unfreeze``, all do.
    """
    network = torchvision_resnet18(num_classes=num_classes)
    network.requires_grad_(unfreeze)
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
    if source is None:
        where = ResNet18_Weights.IMAGENET1K_V1.url
        state = _download(where, check_hash=True)
    elif "://" in source:
        where = source
        # torch's cache knows a file by its name alone, but two URLs may end alike.
        name = f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.pth"
        state = _download(source, file_name=name)
    else:
        where = source
        state = _read_file(source)
    try:
        given = {name.removeprefix("module."): value for name, value in state.items()}
        own = model.network.state_dict()
        last = {name: own[name] for name in own if name.startswith("fc.")}
        model.network.load_state_dict(given | last)
    except Exception as error:  # another network's, without data, or no dict at all
        problem = " ".join(str(error).split())[:200]
        raise UserError(
            f"--pretrained-weights: {where} holds no state dict of torchvision's ResNet-18 "
            f"({problem}): give one as saved by "
            "torch.save(torchvision.models.resnet18(weights='DEFAULT').state_dict(), FILE)"
        ) from error
    return where


def _read_file(path: str) -> Any:
    try:
        return read_saved(read_regular(Path(path), most_bytes=_MOST_BYTES))
    except (UserError, OSError) as error:
        raise _not_loaded(path, error) from error
    except Exception as error:  # a damaged file can raise anything
        raise _not_readable(path, error) from error


def _download(url: str, *, check_hash: bool = False, file_name: str | None = None) -> Any:
    """Return the content of the file at ``url``, which torch keeps in its cache."""
    try:
        return torch.hub.load_state_dict_from_url(
            url,
            map_location="cpu",
            progress=False,
            weights_only=True,
            check_hash=check_hash,
            file_name=file_name,
        )
    except (UserError, OSError) as error:
        raise _not_loaded(url, error) from error
    except Exception as error:  # a damaged file can raise anything
        cached = Path(torch.hub.get_dir(), "checkpoints", file_name or Path(url).name)
        cached.unlink(missing_ok=True)
        raise _not_readable(url, error) from error


def _not_loaded(where: str, error: Exception) -> UserError:
    return UserError(
        f"the pretrained weights could not be loaded from {where} ({reason_of(error)}). {_ADVICE}"
    )


def _not_readable(where: str, error: Exception) -> UserError:
    return UserError(
        f"--pretrained-weights: {where} cannot be read as a file of weights "
        f"({first_line(error)[:100]}): copy it again"
    )
