"""Checks of what lies on this machine's disks: the dataset, room for checkpoints, the code."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.source_hash import source_digests
from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, warning
from lab.doctor.machine import torch_facts

CHECKPOINT_BYTES = 74_000_000
"""Of VGG-11 with SGD's momentum: two times 9,231,114 parameters of 4 bytes."""

_ROOM_FOR = 20
_GIT_SECONDS = 10


def check_dataset(request: CheckRequest) -> CheckResult:
    """The dataset's files are there and whole."""
    name, folder = request.dataset, request.data_dir
    if name == "digits":
        return ok("dataset", "digits come with scikit-learn")
    if name == "folder":
        return _image_folder(folder)
    if torch_facts().error is not None:
        return warning(
            "dataset", "not looked at, since torch cannot be imported", "see the line on torch"
        )
    missing, damaged = dataset_state(name, folder)
    if damaged:
        return failure(
            "dataset",
            f"{name} in {folder} is damaged, sizes or MD5 are wrong: {', '.join(damaged)}",
            "remove those files: the parts download them again; or copy them from a node where they are whole",
        )
    if missing:
        return warning(
            "dataset",
            f"{name} is not in {folder} (missing: {', '.join(missing)})",
            "where this node has no network, copy the folder from one that has it; else the parts download it first",
        )
    return ok("dataset", f"{name} in {folder}, whole by MD5")


@cache
def dataset_state(name: str, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which files of CIFAR are missing, and which are there with a wrong MD5 (torchvision's). Imports torchvision."""
    from torchvision.datasets import CIFAR10, CIFAR100

    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    expected = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    files = [(folder / kind.base_folder / file, md5) for file, md5 in expected]
    missing = tuple(path.name for path, _ in files if not path.is_file())
    damaged = tuple(path.name for path, md5 in files if path.is_file() and _md5(path) != md5)
    return missing, damaged


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _image_folder(folder: Path) -> CheckResult:
    lacking = [
        split
        for split in ("train", "test")
        if not any(path.is_dir() for path in _entries(folder / split))
    ]
    if lacking:
        return failure(
            "dataset",
            f"{folder} has no {' and no '.join(f'{split}/<class>/' for split in lacking)}",
            "give --data-dir, a folder with train/<class>/* and test/<class>/*",
        )
    classes = sorted(path.name for path in _entries(folder / "train") if path.is_dir())
    return ok("dataset", f"{len(classes)} classes in {folder}")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def dataset_fact(request: CheckRequest) -> str:
    """Return a word on the dataset that is the same where its files are: for comparing nodes."""
    if request.dataset == "digits":
        return "digits"
    if request.dataset == "folder":
        listed = [
            f"{path.relative_to(request.data_dir)} {path.stat().st_size}"
            for split in ("train", "test")
            for path in sorted((request.data_dir / split).rglob("*"))
            if path.is_file()
        ]
        return f"folder of {len(listed)} images, {hashlib.sha256(chr(10).join(listed).encode()).hexdigest()[:12]}"
    missing, damaged = dataset_state(request.dataset, request.data_dir)
    return f"{request.dataset} {'damaged' if damaged else 'missing' if missing else 'whole'}"


def check_disk(
    request: CheckRequest, *, usage: Callable[[Path], shutil._ntuple_diskusage] = shutil.disk_usage
) -> CheckResult:
    """The output folder can be written and has room for checkpoints."""
    folder = request.output_dir
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failure(
            "disk",
            f"{folder} cannot be written ({there} {'is no folder' if not there.is_dir() else 'is read-only'})",
            "give another --output-dir, or permit writing there",
        )
    free = usage(there).free
    text = f"{free / 1e9:.1f} GB free in {there}; a checkpoint of VGG-11 takes {CHECKPOINT_BYTES / 1e6:.0f} MB"
    if free < 2 * CHECKPOINT_BYTES:  # the new one is whole before an old one goes
        return failure("disk", text, "make room, or give --output-dir on another disk")
    if free < _ROOM_FOR * CHECKPOINT_BYTES:
        return warning(
            "disk",
            text,
            f"give --keep-checkpoints {max(1, free // CHECKPOINT_BYTES - 1)}, or make room",
        )
    return ok("disk", text)


def check_code(_request: CheckRequest) -> CheckResult:
    """Which code this is."""
    commit, changed = (
        git("rev-parse", "--short", "HEAD"),
        git("status", "--porcelain", "--untracked-files=no"),
    )
    if commit is None:
        return ok("code", f"no git commit; code {code_digest()}")
    return ok("code", f"commit {commit}{' with changes' if changed else ''}, code {code_digest()}")


@cache
def code_digest() -> str:
    """Return twelve digits of a SHA-256 over the source files that the ranks must share, as they compare them at a start."""
    return hashlib.sha256(json.dumps(source_digests(), sort_keys=True).encode()).hexdigest()[:12]


@cache
def git(*arguments: str) -> str | None:
    """Return what git says of this checkout; None without git or a checkout."""
    if not IN_CHECKOUT:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
