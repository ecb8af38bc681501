"""Images in memory: datasets by name, sharding over ranks, batched augmentation, loaders."""

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from common.utils import registry


@dataclass(frozen=True)
class DatasetEntry:
    """What is known of a dataset before it is loaded.

    loader : "module:function", called with the data folder and the mirror; returns a ``Dataset``.
    classes : number of classes; None: the user's files decide.
    file_check : "module:function", called with the data folder; returns which files are missing or
        damaged, "" if none is. "": nothing to check before the dataset is loaded.
    comes_with : the library that brings the images. Such a dataset is small: who trains on it tries
        something out, and needs no hint at a recipe.
    """

    loader: str
    classes: int | None
    file_check: str = ""
    comes_with: str = ""


DATASETS = {
    "cifar10": DatasetEntry(
        "common.data.cifar:load_cifar10", 10, file_check="common.data.cifar:cifar10_problems"
    ),
    "cifar100": DatasetEntry(
        "common.data.cifar:load_cifar100", 100, file_check="common.data.cifar:cifar100_problems"
    ),
    "digits": DatasetEntry("common.data.digits:load_digits", 10, comes_with="scikit-learn"),
    "folder": DatasetEntry("common.data.folder:load_folder", None),
}

FLIPS = ("random", "alternating", "none")
"""Which training images are mirrored in an epoch; ``augmentation.draw`` describes them."""


def load_dataset(name: str, data_dir: Path, *, mirror: str | None = None) -> Any:
    """Return the ``Dataset`` of that name; download CIFAR to ``data_dir`` if it is missing.

    mirror : a URL to download from instead of CIFAR's own; "": do not download.

    Raises UserError if it is unknown, damaged or empty, or missing and cannot be downloaded.
    """
    load = resolve_name(registry.find(DATASETS, name, kind="dataset").loader)
    return load(Path(data_dir), mirror)
