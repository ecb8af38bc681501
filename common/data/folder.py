"""The user's own images, of any kind that Pillow reads: ``train/<class>/*``, ``test/<class>/*``."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.data.dataset import IMAGE_SIZE, Dataset, ImageSet, image_set, pixel_statistics
from common.errors import UserError
from common.utils.atomic_files import regular_target


def load_folder(data_dir: Path, mirror: str | None) -> Dataset:
    """Return all images, turned upright, with the middle square scaled to 32x32.

    The classes are the sorted names of the folders in ``train``. Raises UserError if a folder is
    missing or empty, an image cannot be read, or ``test`` has a class that ``train`` lacks.
    """
    train_folder = data_dir / "train"
    test_folder = data_dir / "test"
    classes = classes_of(train_folder)
    unknown = sorted(set(classes_of(test_folder)) - set(classes))
    if unknown:
        raise UserError(
            f"{test_folder} has classes that {train_folder} lacks: {', '.join(unknown)}"
        )
    train = _read(train_folder, classes, allow_empty_classes=False)
    test = _read(test_folder, classes, allow_empty_classes=True)
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


def _read(folder: Path, classes: list[str], *, allow_empty_classes: bool) -> ImageSet:
    """Read the images of all classes; each must have some, unless ``allow_empty_classes``."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted((folder / name).glob("**/*"))
        of_class = [file for file in files if file.suffix.lower() in IMG_EXTENSIONS]
        if not of_class and not allow_empty_classes:
            raise _no_image(folder / name)
        paths += of_class
        labels += [label] * len(of_class)
    if not paths:
        raise _no_image(folder)
    return image_set(np.stack([_read_image(path) for path in paths]), labels)


def _no_image(folder: Path) -> UserError:
    return UserError(f"--dataset folder: {folder} holds no image ({', '.join(IMG_EXTENSIONS)})")


def _read_image(path: Path) -> np.ndarray:
    regular_target(path)  # opening a FIFO would block
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip to white
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            size = (IMAGE_SIZE, IMAGE_SIZE)
            square = ImageOps.fit(upright.convert("RGB"), size, Image.Resampling.BILINEAR)
            return np.asarray(square)
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
