"""What the tests of the emulated cluster share: whether this machine allows one, and what a cluster leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from lab.cluster import tools
from tests.helpers import ROOT

REFUSED = tools.namespaces_refused()
needs_namespaces = pytest.mark.skipif(REFUSED is not None, reason=f"no emulated cluster here: {REFUSED}")
PLACES = [pytest.param(False, marks=needs_namespaces, id="namespaces"), pytest.param(True, id="loopback")]
LONG = 120.0


@dataclass
class Lab:
    """``lab cluster`` as a user starts it, with temporary files in a folder of its own."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen:
        """Start ``lab cluster`` with these arguments and return at once."""
        process = subprocess.Popen([sys.executable, "-m", "lab", "cluster", *arguments], cwd=ROOT, text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env=os.environ | {"TMPDIR": str(self.temporary)})
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run ``lab cluster`` with these arguments; return its exit status and what it wrote."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=LONG)
        return process.returncode, output

    @property
    def temporary(self) -> Path:
        """Where temporary files would lie."""
        return self.folder / "temporary"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Start ``lab cluster`` commands, and end those that a test has left running."""
    one = Lab(tmp_path)
    one.temporary.mkdir()
    yield one
    for process in one.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LONG)


def until(condition: Callable[[], object], *, what: str) -> None:
    """Wait until ``condition`` holds; fail, saying what did not come, after a long time."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LONG:g} s"
        time.sleep(0.05)


def with_word(word: str) -> list[int]:
    """Return the processes of the whole machine that have a word in their command or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if word in " ".join(process.cmdline()) or word in process.environ().values():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def networks(pids: list[int]) -> set[str]:
    """Return the network namespaces that these processes are in."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found
