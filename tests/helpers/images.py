"""Create images for ``--dataset folder``."""


def make_image_folder(root, *, train_per_class=12, test_per_class=4, seed=0):
    """Write PNG images of two classes in the layout of ``--dataset folder`` and return ``root``."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(seed)
    for split, count in (("train", train_per_class), ("test", test_per_class)):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 128, (32, 32, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:03}.png")
    return root
