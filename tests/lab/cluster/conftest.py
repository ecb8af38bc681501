"""The ``lab`` fixture for the tests of the emulated cluster."""

import signal

import pytest

from tests.helpers import LONG
from tests.helpers.cluster import Lab


@pytest.fixture
def lab(tmp_path):
    """Start ``lab cluster`` commands, and kill those that a test leaves running."""
    one = Lab(tmp_path)
    one.temporary.mkdir()
    yield one
    for process in one.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LONG)
