"""What holds for every test: nothing is left running, and some tests have the machine to themselves."""

import fcntl
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.helpers import kill_started

torch.set_num_threads(
    1
)  # two files run at once, and threads that wait for each other's cores are slower than none

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job: what the tests start would ignore Ctrl-C, too, and some tests send
    # it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test that fails must not leave its ranks behind, to slow down all that follow."""
    yield
    kill_started()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test marked ``alone`` wait until pytest-xdist's other workers are between two tests, and hold them there.

    Two locks: who waits to be alone keeps the first, so that no other test begins before its turn.
    """
    if not hasattr(item.config, "workerinput"):  # one process runs all tests, one after the other
        return (yield)
    folder = item.config.rootpath / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    with (folder / "next.lock").open("w") as turn, (folder / "running.lock").open("w") as running:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)
