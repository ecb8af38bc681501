"""Linux-only features: elsewhere no call raises, and ``missing_features`` lists them."""

import ctypes
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.utils import environment, processes, system

ON_LINUX = sys.platform == "linux"
MISSING = "not killed with their parent", "returned to the system", "more ranks than", "all cores"


class LibraryWithout:
    """A C library without Linux's functions."""

    def __init__(self, name):
        pass


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Imitate a system without prctl, mallopt, CPU affinity and /proc."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", LibraryWithout)
    monkeypatch.setattr(system, "Path", lambda path: tmp_path / path.lstrip("/"))


@pytest.mark.skipif(not ON_LINUX, reason="what Linux has")
def test_linux_lacks_nothing():
    assert system.missing_features() == []
    assert system.tune_malloc()


@pytest.mark.skipif(not ON_LINUX, reason="the kernel's signal at the parent's end is Linux's")
def test_a_child_asks_to_be_killed_with_its_parent():
    wanted = (
        "import ctypes; s = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(s)); "
        "print(s.value)"
    )
    command = [sys.executable, "-c", wanted]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=processes.kill_on_parent_exit(),
    )
    assert done.stdout.strip() == "9"


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_every_function_works():
    assert system.usable_cores() == os.cpu_count()
    assert system.tune_malloc() is False
    assert processes.kill_on_parent_exit() is None
    processes.adopt_orphans()
    with system.batch_scheduling(True):
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes
    assert 0 < most <= environment.peak_memory_bytes() <= 2 * most
    assert environment._cpu_name()
    assert 0 < system.free_port() < 65536


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_what_is_missing_is_named_with_what_happens_instead():
    for sentence, name in zip(system.missing_features(), MISSING, strict=True):
        assert name in sentence
        assert ": " in sentence


@pytest.mark.skipif(not ON_LINUX, reason="what Linux has")
def test_a_scheduling_that_the_user_has_chosen_stays():
    def chosen():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        with system.batch_scheduling(True):
            return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen).result(timeout=10) == os.SCHED_IDLE
    with pytest.raises(KeyError), system.batch_scheduling(True):
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
