"""What holds for every test."""

import signal
from collections.abc import Iterator

import pytest

from tests.helpers import kill_started

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job: what the tests start would ignore Ctrl-C, too, and some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test that fails must not leave its ranks behind, to slow down all that follow."""
    yield
    kill_started()
