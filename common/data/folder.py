"""The user's own images, of any kind that Pillow reads: ``train/<class>/*``, ``test/<class>/*``."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.data.dataset import IMAGE_SIZE, Dataset, ImageSet, pixel_statistics
from common.errors import UserError
from common.utils.atomic_files import regular_target


def load_folder(data_dir: Path, mirror: str | None) -> Dataset:
    """Return all images, turned upright, with the middle square scaled to 32x32.

    The classes are the sorted names of the folders in ``train``. Raises UserError if a folder is
    missing or empty, an image cannot be read, or ``test`` has a class that ``train`` lacks.
    """
    classes = classes_of(data_dir / "train")
    if unknown := sorted(set(classes_of(data_dir / "test")) - set(classes)):
        raise UserError(
            f"{data_dir / 'test'} has classes that {data_dir / 'train'} lacks: {', '.join(unknown)}"
        )
    train, test = (_read(data_dir / split, classes) for split in ("train", "test"))
    mean, std = pixel_statistics(train.images)
    return Dataset("folder", train, test, tuple(classes), mean, std)


def classes_of(folder: Path) -> list[str]:
    """Return the sorted names of the folders in ``folder``. Raises UserError if there are none."""
    classes = sorted(entry.name for entry in folder.glob("*/") if not entry.name.startswith("."))
    if not classes:
        reason = "holds no folders" if folder.is_dir() else "is missing"
        raise UserError(
            f"--dataset folder: {folder} {reason}; --data-dir must hold train/<class>/* and "
            "test/<class>/*"
        )
    return classes


def _read(folder: Path, classes: list[str]) -> ImageSet:
    paths = {
        folder / name: sorted(
            p for p in (folder / name).glob("**/*") if p.suffix.lower() in IMG_EXTENSIONS
        )
        for name in classes
    }
    # Each class needs images to train with; the test set may lack some classes.
    empty = [place for place, found in paths.items() if not found and folder.name == "train"]
    if empty or not any(paths.values()):
        place = empty[0] if empty else folder
        raise UserError(f"--dataset folder: {place} holds no image ({', '.join(IMG_EXTENSIONS)})")
    images = np.stack([_read_image(path) for found in paths.values() for path in found])
    labels = [label for label, found in enumerate(paths.values()) for _ in found]
    return ImageSet(torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64))


def _read_image(path: Path) -> np.ndarray:
    regular_target(path)  # opening a FIFO would block
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip to white
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            upright = upright.convert("RGB")
            return np.asarray(
                ImageOps.fit(upright, (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
            )
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        SyntaxError,
        ValueError,
    ) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}): replace or remove it"
        ) from error
