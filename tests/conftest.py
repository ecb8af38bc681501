"""What holds for every test."""

from collections.abc import Iterator

import pytest

from tests.helpers import kill_started


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test that fails must not leave its ranks behind, to slow down all that follow."""
    yield
    kill_started()
