"""Images in memory: datasets by name, sharding over ranks, batched augmentation, loaders."""

from pathlib import Path
from typing import Any

from common.utils import registry

DATASETS = {
    "cifar10": "common.data.cifar:load_cifar10",
    "cifar100": "common.data.cifar:load_cifar100",
    "digits": "common.data.digits:load_digits",
    "folder": "common.data.folder:load_folder",
}

FLIPS = ("random", "alternating", "none")
"""Which training images are mirrored in an epoch; ``augmentation.draw`` describes them."""


def load_dataset(name: str, data_dir: Path, *, mirror: str | None = None) -> Any:
    """Return the ``Dataset`` of that name; download CIFAR to ``data_dir`` if it is missing.

    mirror : a URL to download from instead of CIFAR's own; "": do not download.

    Raises UserError if it is unknown, damaged or empty, or missing and cannot be downloaded.
    """
    return registry.load(DATASETS, name, kind="dataset")(Path(data_dir), mirror)
