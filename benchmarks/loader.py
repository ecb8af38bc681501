"""Compare TrainLoader's batched tensor code with PIL transforms in a DataLoader.

    python benchmarks/loader.py

The unit is images per second and core. Three loaders take turns of some seconds each, and every
round gives one ratio:

- ours: ``TrainLoader`` on one thread, everything included: order, offsets, crop, flip,
  normalisation, labels.
- plain, one core: torchvision's dataset and PIL transforms in a ``DataLoader`` without workers, on
  one thread.
- plain, 2 workers: the same in two worker processes, divided by the number of cores that they can
  fill. The process that collects their batches counts as free, which favours the plain loader.

Before another loader's turn, the workers fill their queue and then sleep (``wait_until_idle``).
Before the workers' own turn the queue is emptied, so that only batches made within the measured
time count.

This file also holds what the other benchmarks share: the flags, the datasets, both loaders, the
description of the machine, and the spread.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms
from torchvision.datasets import CIFAR10

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from common.data import load_dataset  # noqa: E402
from common.data.dataset import Dataset, ImageSet  # noqa: E402
from common.data.loaders import TrainLoader  # noqa: E402
from common.data.sharding import GlobalBatchSampler  # noqa: E402
from common.utils.environment import environment  # noqa: E402
from common.utils.system import usable_cores  # noqa: E402
from lab.flags import add_flags  # noqa: E402

PLAIN_WORKERS = 2
PREFETCH_FACTOR = 2
SEED = 0
_QUIET_SECONDS = 0.3
_PATIENCE_SECONDS = 120.0


def describe_machine() -> str:
    """Return the line that every benchmark prints: CPU, cores, versions and commit."""
    facts = environment()
    commit = (
        f"{(facts['git_commit'] or 'none')[:10]}{' with changes' if facts['git_changes'] else ''}"
    )
    return (
        f"machine: {facts['cpu']}, {facts['usable_cores']} cores usable, load "
        f"{psutil.getloadavg()[0]:.1f}; Python {facts['python']}, torch {torch.__version__}, "
        f"torchvision {facts['torchvision']}; commit {commit}"
    )


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return 'median (minimum to maximum)' of the rounds' values, each in the format ``form``."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def whole_number(text: str) -> int:
    """Return a flag's value as an int of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, give a whole number, 1 or more")
    return int(text)


def parse_flags(about: str | None, flags: Mapping[str, Mapping[str, Any]]) -> argparse.Namespace:
    """Return the parsed flags of a benchmark. flags : see lab/flags.py."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, flags)
    return parser.parse_args()


# The flags that choose images and batch size.
DATA_FLAGS: dict[str, dict[str, Any]] = {
    "--dataset": {
        "choices": ("cifar10", "digits"),
        "default": "cifar10",
        "help": "digits replaces cifar10 if its files are missing (default: cifar10)",
    },
    "--data-dir": {"type": Path, "default": REPOSITORY / "data", "help": "folder of CIFAR-10"},
    "--batch-size": {
        "type": whole_number,
        "default": 256,
        "help": "samples per step (default: 256)",
    },
}


def load_benchmark_dataset(
    name: str, data_dir: Path, *, batch_size: int, quiet: bool = False
) -> Dataset:
    """Return the dataset of that name, or digits with a note if CIFAR-10's files are missing.

    Nothing is downloaded. Ends the program if a batch would be larger than the training set, or too
    small for BatchNorm.
    """
    if name == "cifar10" and not (data_dir / CIFAR10.base_folder).is_dir():
        print(
            f"NOTE: {data_dir / CIFAR10.base_folder} is missing: measuring on digits instead of "
            "CIFAR-10"
        )
        name = "digits"
    dataset = load_dataset(name, data_dir)
    if not 2 <= batch_size <= len(dataset.train):
        sys.exit(
            f"error: --batch-size: got {batch_size}, give 2 to {len(dataset.train)} for {name}"
        )
    if not quiet:
        print(f"data: {name}, {len(dataset.train):,} training images")
    return dataset


def our_loader(dataset: Dataset, *, batch_size: int) -> TrainLoader:
    """Return this project's loader for one process.

    It gives only whole batches, so that all steps have one size.
    """
    whole = len(dataset.train) // batch_size * batch_size
    return TrainLoader(dataset, GlobalBatchSampler(whole, batch_size=batch_size, seed=SEED))


class _PilImages(TorchDataset):
    """Images in memory, read through PIL one at a time as from torchvision's own datasets."""

    def __init__(self, images: ImageSet, transform: transforms.Compose) -> None:
        self._images, self._labels, self._transform = (
            images.images.numpy(),
            images.labels.tolist(),
            transform,
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), self._labels[index]


def plain_loader(dataset: Dataset, data_dir: Path, *, batch_size: int, workers: int) -> DataLoader:
    """Return the usual loader: PIL transforms, one image at a time, shuffled, in whole batches."""
    flip = [transforms.RandomHorizontalFlip()] if dataset.flip else []
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            *flip,
            transforms.ToTensor(),
            transforms.Normalize(dataset.mean, dataset.std),
        ]
    )
    if dataset.name == "cifar10":
        images: TorchDataset = CIFAR10(str(data_dir), train=True, transform=transform)
    else:
        images = _PilImages(dataset.train, transform)
    return DataLoader(
        images,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
    )


def endless(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch after another, each epoch in its own order."""
    for epoch in itertools.count(1):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader


def wait_until_idle() -> None:
    """Return once this process's children (DataLoader workers) use no CPU: their queue is full.

    Raises TimeoutError if they are still busy after 120 s.
    """

    def cpu_seconds() -> float:
        return sum(
            sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True)
        )

    deadline = time.monotonic() + _PATIENCE_SECONDS
    before = cpu_seconds()
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        now = cpu_seconds()
        if now == before:
            return
        before = now
    raise TimeoutError(f"the DataLoader's workers were still busy after {_PATIENCE_SECONDS:.0f} s")


def images_per_second(
    batches: Iterator[tuple[Tensor, Tensor]], *, seconds: float, discard: int = 0
) -> float:
    """Take ``discard`` batches, then whole ones for ``seconds``; return the rate of the latter."""
    for _ in range(discard):
        next(batches)
    images, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        images += len(next(batches)[1])
    return images / elapsed


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the loaders in turns; return each one's images per second and core, by round."""
    dataset = load_benchmark_dataset(
        arguments.dataset, arguments.data_dir, batch_size=arguments.batch_size
    )
    size = arguments.batch_size
    loaders = {
        "ours, 1 thread": our_loader(dataset, batch_size=size),
        "plain, 1 core": plain_loader(dataset, arguments.data_dir, batch_size=size, workers=0),
        f"plain, {PLAIN_WORKERS} workers": plain_loader(
            dataset, arguments.data_dir, batch_size=size, workers=PLAIN_WORKERS
        ),
    }
    batches = {name: endless(loader) for name, loader in loaders.items()}
    cores = min(PLAIN_WORKERS, usable_cores())
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for round_number in range(arguments.rounds + 1):
        for name, stream in batches.items():
            workers = getattr(loaders[name], "num_workers", 0)
            wait_until_idle()
            rate = images_per_second(
                stream,
                seconds=arguments.seconds if round_number else arguments.seconds / 4,
                discard=workers * PREFETCH_FACTOR,
            )
            if round_number:  # the first round warms up
                rates[name].append(rate / cores if workers else rate)
    return rates


def main() -> None:
    """Measure and print."""
    flags = {
        **DATA_FLAGS,
        "--rounds": {
            "type": whole_number,
            "default": 7,
            "help": "turns of each loader (default: 7)",
        },
        "--seconds": {"type": float, "default": 2.0, "help": "length of a turn (default: 2)"},
    }
    arguments = parse_flags(__doc__, flags)
    torch.set_num_threads(1)
    print(describe_machine())
    print(
        f"settings: batch {arguments.batch_size}, 1 thread, {arguments.rounds} rounds of "
        f"{arguments.seconds:g} s per loader after a short warm-up round; median (minimum to "
        "maximum) over the rounds"
    )
    rates = measure(arguments)
    ours = next(iter(rates.values()))
    print(f"\n{'loader':<18}{'images/s/core':<30}ours / it")
    for name, values in rates.items():
        ratios = [mine / its for mine, its in zip(ours, values, strict=True)]
        print(
            f"{name:<18}{spread(values, ',.0f'):<30}"
            f"{spread(ratios, '.1f') if values is not ours else '-'}"
        )


if __name__ == "__main__":
    main()
