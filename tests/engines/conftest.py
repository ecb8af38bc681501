"""Every test in this folder runs an engine for real, and is marked ``engines``: CI runs them apart, after the others."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them; this hook sees the tests of every folder."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.engines)
