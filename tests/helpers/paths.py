"""The project's folders, and marks for tests that need the real CIFAR files."""

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
