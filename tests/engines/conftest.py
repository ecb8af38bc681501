"""Each test here runs a real engine and is marked ``engines`` (``make test-engines``)."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark this folder's tests; pytest passes the tests of every folder to this hook."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.engines)
