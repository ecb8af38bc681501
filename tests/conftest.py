"""Fixtures for all tests: end leftover processes, and run tests marked ``alone`` by themselves."""

import fcntl
import gc
import signal

import pytest
import torch

from tests.helpers import kill_started

# Several test files run at once, and threads that compete for cores are slower than one thread.
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores SIGINT, and so would the processes that tests start. Some
    # tests send them SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_left_running():
    """End the processes that a test left running, so that they do not slow down later tests."""
    yield
    kill_started()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage among the imported modules: they stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with the files of the longest limits and the most tests, so that none ends last."""
    of_file = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        of_file.setdefault(item.path, []).append(limit.args[0] if limit else 0)
    items.sort(key=lambda item: (-max(of_file[item.path]), -len(of_file[item.path])))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test marked ``alone`` while all other workers of pytest-xdist are between two tests.

    Every test takes ``next.lock`` before ``running.lock``. A test that waits to run alone holds
    ``next.lock``, so no other test starts before it. Processes that a test forks hold no lock.
    What runs is in files, for whoever has to end a hanging run.
    """
    if not hasattr(item.config, "workerinput"):  # without xdist, tests run one after the other
        return (yield)
    folder = item.config.rootpath / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    now = folder / f"now-{item.config.workerinput['workerid']}"
    with (folder / "next.lock").open("a+") as turn, (folder / "running.lock").open("a+") as running:
        now.write_text(f"waits to run {item.nodeid}\n")
        fcntl.lockf(turn, fcntl.LOCK_EX)
        fcntl.lockf(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.lockf(turn, fcntl.LOCK_UN)
        now.write_text(f"{item.nodeid}\n")
        return (yield)
