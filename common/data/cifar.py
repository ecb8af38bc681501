"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), read by torchvision.

One process of a machine downloads them; the others wait for it.
"""

import http.client
import tarfile
from pathlib import Path

import torch
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, extract_archive

from common.data.dataset import Dataset, ImageSet
from common.data.download import fetch, lock_for_download
from common.errors import UserError, reason_of
from common.utils.atomic_files import regular_target

# The assignment's own: mean (125.3, 123.0, 113.9) and std (63.0, 62.1, 66.7) of 255.
_CIFAR10_STATISTICS = (
    (125.3 / 255, 123.0 / 255, 113.9 / 255),
    (63.0 / 255, 62.1 / 255, 66.7 / 255),
)
_CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def load_cifar10(data_dir: Path, mirror: str | None) -> Dataset:
    """Return CIFAR-10: 50,000 and 10,000 images of 10 classes."""
    return _load(CIFAR10, "cifar10", data_dir, mirror, *_CIFAR10_STATISTICS)


def load_cifar100(data_dir: Path, mirror: str | None) -> Dataset:
    """Return CIFAR-100: 50,000 and 10,000 images of 100 classes."""
    return _load(CIFAR100, "cifar100", data_dir, mirror, *_CIFAR100_STATISTICS)


def _load(
    kind: type[CIFAR10], name: str, data_dir: Path, mirror: str | None, mean: tuple, std: tuple
) -> Dataset:
    _download_where_missing(kind, name, data_dir, mirror)
    splits = [kind(str(data_dir), train=is_train) for is_train in (True, False)]
    train, test = (
        ImageSet(torch.from_numpy(split.data), torch.tensor(split.targets, dtype=torch.int64))
        for split in splits
    )
    return Dataset(name, train, test, tuple(splits[0].classes), mean, std)


def _download_where_missing(
    kind: type[CIFAR10], name: str, data_dir: Path, mirror: str | None
) -> None:
    """Download the files unless they are there and whole.

    The process that holds the lock checks again and downloads if needed; the others wait, then
    find the files. Each file must have the right MD5, so a truncated download is repeated.
    Raises UserError with the reason and the alternatives.
    """
    problems = _problems(kind, data_dir)
    if not problems:
        return
    url = _url(kind, mirror)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with lock_for_download(data_dir / f".{name}.lock", name):
            if _problems(kind, data_dir):
                _download(kind, data_dir, url)
            if lacking := _problems(kind, data_dir):
                raise OSError(f"the archive in that folder lacks {lacking}")
    except (
        OSError,
        RuntimeError,
        EOFError,
        tarfile.TarError,
        ValueError,
        http.client.HTTPException,
    ) as error:
        raise UserError(
            f"{name} is not in {data_dir} ({problems}) and could not be downloaded from {url} "
            f"({reason_of(error)}). Give --data-dir FOLDER (a folder that holds "
            f"{kind.base_folder}/), --mirror URL (another host), or --dataset digits, which needs "
            "no download"
        ) from error


def _problems(kind: type[CIFAR10], data_dir: Path) -> str:
    """Return which files are missing or damaged; "" if all are there and whole."""
    folder = data_dir / kind.base_folder
    files = dict([*kind.train_list, *kind.test_list])
    bad = [file for file, md5 in files.items() if not check_integrity(str(folder / file), md5)]
    missing = [file for file in bad if not (folder / file).exists()]
    damaged = [file for file in bad if file not in missing]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"damaged, the MD5 is wrong: {', '.join(damaged)}"] if damaged else []
    if not bad and not check_integrity(str(folder / kind.meta["filename"]), kind.meta["md5"]):
        return "the list of classes is missing or damaged"
    return "; ".join(problems)


def _url(kind: type[CIFAR10], mirror: str | None) -> str:
    if mirror is None:
        return kind.url
    return mirror if mirror.endswith(kind.filename) else f"{mirror.rstrip('/')}/{kind.filename}"


def _download(kind: type[CIFAR10], data_dir: Path, url: str) -> None:
    """Download the archive unless it is there and whole, and unpack it."""
    # Not kind(download=True), which does nothing if only the list of classes is missing.
    archive = data_dir / kind.filename
    for file, _ in (*kind.train_list, *kind.test_list):
        regular_target(data_dir / kind.base_folder / file)  # writing to a FIFO would block
    if not check_integrity(str(archive), kind.tgz_md5):
        fetch(url, archive)
        if not check_integrity(str(archive), kind.tgz_md5):
            raise OSError("the archive that arrived is incomplete, or is another one")
    extract_archive(str(archive), str(data_dir))
