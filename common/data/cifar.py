"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), read by torchvision.

One process of a machine downloads them; the others wait for it. Each file must have the right MD5,
so what a crash or a bad mirror left never counts as data.
"""

import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, extract_archive

from common.data.dataset import Dataset, image_set
from common.errors import UserError, reason_of
from common.say import bytes_text
from common.utils.atomic_files import regular_target
from common.utils.file_lock import FOR_EVER, lock_file
from common.utils.progress import console, show_progress

_STALL_SECONDS = 60.0
_SILENT_SECONDS = 3.0
_CHUNK_BYTES = 2**18
_MEGABYTE = 1e6
_MOST_BYTES = 2**30  # the largest archive has 170 MB
_DOWNLOAD_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    tarfile.TarError,
    HTTPException,
)


def _load(
    kind: type[CIFAR10], name: str, mean: tuple, std: tuple, data_dir: Path, mirror: str | None
) -> Dataset:
    if problems := file_problems(kind, data_dir):
        if mirror == "":
            raise UserError(f"{name} is not in {data_dir} ({problems})")
        url = kind.url
        if mirror is not None:  # the folder, or the archive itself
            url = f"{mirror.removesuffix(kind.filename).rstrip('/')}/{kind.filename}"
        try:
            _download(kind, name, data_dir, url)
        except _DOWNLOAD_ERRORS as error:
            raise UserError(
                f"{name} is not in {data_dir} ({problems}) and could not be downloaded from {url} "
                f"({reason_of(error)}). Give --data-dir FOLDER (a folder that holds "
                f"{kind.base_folder}/), --mirror URL (another host), or --dataset digits, which "
                "needs no download"
            ) from error
    train = kind(str(data_dir), train=True)
    test = kind(str(data_dir), train=False)
    return Dataset(
        name,
        image_set(train.data, train.targets),
        image_set(test.data, test.targets),
        tuple(train.classes),
        mean,
        std,
    )


def file_problems(kind: type[CIFAR10], data_dir: Path) -> str:
    """Return which files are missing or damaged; "" if all are there and whole."""
    folder = data_dir / kind.base_folder
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    missing = []
    damaged = []
    for file, md5 in files:
        if not (folder / file).exists():
            missing.append(file)
        elif not check_integrity(str(folder / file), md5):
            damaged.append(file)
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if damaged:
        problems.append(f"damaged, the MD5 is wrong: {', '.join(damaged)}")
    return "; ".join(problems)


def _download(kind: type[CIFAR10], name: str, data_dir: Path, url: str) -> None:
    """Download the archive unless it is there and whole, and unpack it.

    The process that holds the lock does so; the others wait, then find the files.
    """
    archive = data_dir / kind.filename
    data_dir.mkdir(parents=True, exist_ok=True)
    with _lock(data_dir / f".{name}.lock", name):
        # Not kind(download=True), which does nothing if only the list of classes is missing.
        if file_problems(kind, data_dir):
            if not check_integrity(str(archive), kind.tgz_md5):
                fetch(url, archive)
            if not check_integrity(str(archive), kind.tgz_md5):
                raise OSError("the archive that arrived is incomplete, or is another one")
            extract_archive(str(archive), str(data_dir))


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Take the lock file ``path``; tell if another process of this machine holds it for long."""
    folder = path.parent
    advice = "if several processes download there at once, start again"
    try:
        lock = lock_file(path, wait_seconds=_SILENT_SECONDS, name=folder, advice=advice)
    except TimeoutError:
        console.print(f"waiting for another process that downloads {name} to {folder}")
        lock = lock_file(path, wait_seconds=FOR_EVER, name=folder, advice=advice)
    try:
        yield
    finally:
        lock.release()


def fetch(url: str, path: Path) -> None:
    """Write what ``url`` sends to ``path``, and show how much has arrived.

    Raises OSError, ValueError or HTTPException, also if the host sends nothing for a minute.
    """
    target = regular_target(path)
    request = urllib.request.Request(url, headers={"User-Agent": "data-parallel-lab"})
    with (
        urllib.request.urlopen(request, timeout=_STALL_SECONDS) as response,
        target.open("wb") as file,
    ):
        bytes_to_come = int(response.headers.get("Content-Length", 0))
        total = round(bytes_to_come / _MEGABYTE) or None  # None: unknown, or less than half a MB
        size = f" ({total:,} MB)" if total else ""
        console.print(f"downloading {url}{size} to {path.parent}", markup=False)
        with show_progress(f"download of {path.name}", total=total, unit="MB") as show:
            while chunk := response.read(_CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > _MOST_BYTES:
                    raise OSError(f"more than {bytes_text(_MOST_BYTES)} came: it is no archive")
                show(round(file.tell() / _MEGABYTE))


cifar10_problems = partial(file_problems, CIFAR10)
cifar100_problems = partial(file_problems, CIFAR100)

# The arguments are ``data_dir`` and ``mirror``. CIFAR-10's statistics are the assignment's own.
load_cifar10 = partial(  # 50,000 and 10,000 images of 10 classes
    _load,
    CIFAR10,
    "cifar10",
    (125.3 / 255, 123.0 / 255, 113.9 / 255),
    (63.0 / 255, 62.1 / 255, 66.7 / 255),
)
load_cifar100 = partial(  # 50,000 and 10,000 images of 100 classes
    _load, CIFAR100, "cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
)
