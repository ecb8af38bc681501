"""scikit-learn's handwritten digits: they come with the library and need no download."""

from pathlib import Path

import numpy as np

from common.data.dataset import IMAGE_SIZE, Dataset, image_set, pixel_statistics

_TEST_SAMPLES = 360
_SPLIT_SEED = 0


def load_digits(data_dir: Path, mirror: str | None) -> Dataset:
    """Return 1,437 digits for training and 360 for testing: a fixed split, stratified by class.

    Each of the 8x8 pixels, of 17 greys, becomes 4x4 pixels of three equal channels.
    """
    from sklearn.datasets import load_digits as load_bundled
    from sklearn.model_selection import train_test_split

    bundled = load_bundled()
    greys = np.round(bundled.images * (255 / 16)).astype(np.uint8)
    repeat = IMAGE_SIZE // greys.shape[1]
    large = greys.repeat(repeat, axis=1).repeat(repeat, axis=2)  # (n, 32, 32)
    images = large[..., None].repeat(3, axis=3)
    train_x, test_x, train_y, test_y = train_test_split(
        images,
        bundled.target,
        test_size=_TEST_SAMPLES,
        stratify=bundled.target,
        random_state=_SPLIT_SEED,
    )
    train = image_set(train_x, train_y)
    test = image_set(test_x, test_y)
    classes = tuple(str(digit) for digit in bundled.target_names)
    mean, std = pixel_statistics(train.images)
    return Dataset("digits", train, test, classes, mean, std, flip=False)
