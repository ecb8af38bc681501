"""Emulated clusters in tests: whether this machine allows one, ``lab cluster`` as a user starts it, what is left behind."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from lab.cluster import tools
from tests.helpers.paths import ROOT
from tests.helpers.waiting import LONG

REFUSED = tools.namespaces_refused()
needs_namespaces = pytest.mark.skipif(
    REFUSED is not None, reason=f"no emulated cluster here: {REFUSED}"
)


@dataclass
class Lab:
    """``lab cluster`` as a user starts it, with temporary files in a folder of its own."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen:
        """Start ``lab cluster`` with these arguments and return at once."""
        process = subprocess.Popen(
            [sys.executable, "-m", "lab", "cluster", *arguments],
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(self.temporary)},
        )
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


@contextlib.contextmanager
def held_networks(pids: list[int]) -> Iterator[set[str]]:
    """The network namespaces that these processes are in, held so that no later one of other processes gets the same name."""
    held = {}
    with contextlib.ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(OSError):
                file = stack.enter_context(Path(f"/proc/{pid}/ns/net").open())
                held[os.readlink(f"/proc/self/fd/{file.fileno()}")] = file
        yield set(held)
