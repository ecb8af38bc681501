"""The project's folders, and marks for tests that need the real CIFAR files."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CIFAR = ROOT / "data"

needs_cifar10 = pytest.mark.skipif(
    not (CIFAR / "cifar-10-batches-py" / "test_batch").exists(),
    reason="the real CIFAR-10 is not in data/",
)
needs_cifar100 = pytest.mark.skipif(
    not (CIFAR / "cifar-100-python" / "test").exists(), reason="the real CIFAR-100 is not in data/"
)


def copy_clone(folder, *, wanted=lambda name: True):
    """Copy the files that git would commit now to a folder."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    for name in subprocess.check_output(listing, text=True).split("\0"):
        if (ROOT / name).is_file() and wanted(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
