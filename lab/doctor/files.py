"""Checks of this machine's disks: the dataset, room for checkpoints, the code."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from common.utils.environment import git
from common.utils.source_hash import source_digests
from lab.doctor.check_result import FAILURE, OK, WARNING, CheckRequest, CheckResult
from lab.doctor.machine import torch_facts

# A checkpoint of VGG-11 with SGD's momentum: two times 9,231,114 parameters of 4 bytes.
_CHECKPOINT_BYTES = 74_000_000

_ROOM_FOR = 20


def check_dataset(request: CheckRequest) -> CheckResult:
    """Check that the dataset's files exist and are whole."""
    name, folder = request.dataset, request.data_dir
    if name == "digits":
        return CheckResult("dataset", OK, "digits comes with scikit-learn")
    if name == "folder":
        return _image_folder(folder)
    if torch_facts().error is not None:
        return CheckResult(
            "dataset",
            WARNING,
            "not checked, because torch cannot be imported",
            "see the line about torch above",
        )
    missing, damaged = dataset_state(name, folder)
    if damaged:
        return CheckResult(
            "dataset",
            FAILURE,
            f"{name} in {folder} is damaged (wrong size or MD5): {', '.join(damaged)}",
            "delete these files (the next run downloads them again), or copy them from a node that "
            "has good ones",
        )
    if missing:
        return CheckResult(
            "dataset",
            WARNING,
            f"{name} is not in {folder} (missing: {', '.join(missing)})",
            "with internet access, nothing: a run downloads it first; otherwise copy the folder "
            "from a node that has it",
        )
    return CheckResult("dataset", OK, f"{name} in {folder}, complete (MD5 checked)")


@cache
def dataset_state(name: str, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which files of CIFAR are missing, and which are damaged (their MD5 is wrong).

    Imports torchvision, which knows each file's MD5.
    """
    from torchvision.datasets import CIFAR10, CIFAR100
    from torchvision.datasets.utils import check_integrity

    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    expected = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    md5s = {folder / kind.base_folder / file: md5 for file, md5 in expected}
    bad = [path for path, md5 in md5s.items() if not check_integrity(str(path), md5)]
    return (
        tuple(path.name for path in bad if not path.is_file()),
        tuple(path.name for path in bad if path.is_file()),
    )


def _image_folder(folder: Path) -> CheckResult:
    classes = {
        split: [path for path in (folder / split).glob("*") if path.is_dir()]
        for split in ("train", "test")
    }
    lacking = [f"{split}/<class>/" for split, found in classes.items() if not found]
    if lacking:
        return CheckResult(
            "dataset",
            FAILURE,
            f"{folder} has no {' and no '.join(lacking)}",
            "give a --data-dir that contains train/<class>/* and test/<class>/*",
        )
    return CheckResult("dataset", OK, f"{len(classes['train'])} classes in {folder}")


def dataset_fact(request: CheckRequest) -> str:
    """Return a short description of the dataset, equal on nodes that have the same files."""
    if request.dataset == "digits":
        return "digits"
    if request.dataset == "folder":
        listed = [
            f"{path.relative_to(request.data_dir)} {path.stat().st_size}"
            for split in ("train", "test")
            for path in sorted((request.data_dir / split).rglob("*"))
            if path.is_file()
        ]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        return f"folder of {len(listed)} images, {digest[:12]}"
    states = {OK: "complete", WARNING: "missing", FAILURE: "damaged"}
    return f"{request.dataset} {states[check_dataset(request).status]}"


def check_disk(
    request: CheckRequest, *, usage: Callable[[Path], shutil._ntuple_diskusage] = shutil.disk_usage
) -> CheckResult:
    """Check that the output folder can be written and has room for checkpoints."""
    folder = request.output_dir
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return CheckResult(
            "disk",
            FAILURE,
            f"{folder} cannot be written "
            f"({there} {'is read-only' if there.is_dir() else 'is not a folder'})",
            "give another --output-dir, or change the folder's permissions",
        )
    free = usage(there).free
    text = (
        f"{free / 1e9:.1f} GB free in {there}; "
        f"a checkpoint of VGG-11 takes {_CHECKPOINT_BYTES / 1e6:.0f} MB"
    )
    if free < 2 * _CHECKPOINT_BYTES:  # an old one is deleted only after the new one is written
        return CheckResult(
            "disk", FAILURE, text, "free some space, or give an --output-dir on another disk"
        )
    if free < _ROOM_FOR * _CHECKPOINT_BYTES:
        return CheckResult(
            "disk",
            WARNING,
            text,
            f"free some space, or give --keep-checkpoints {max(1, free // _CHECKPOINT_BYTES - 1)}",
        )
    return CheckResult("disk", OK, text)


def check_code(_request: CheckRequest) -> CheckResult:
    """Report which code this is."""
    commit = git("rev-parse", "--short", "HEAD")
    changes = (
        " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    )
    which = f"commit {commit}{changes}," if commit else "no git commit;"
    return CheckResult("code", OK, f"{which} source hash {code_digest()}")


@cache
def code_digest() -> str:
    """Return twelve digits of a SHA-256 over the source files that all ranks must share."""
    return hashlib.sha256(json.dumps(source_digests(), sort_keys=True).encode()).hexdigest()[:12]
