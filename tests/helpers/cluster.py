"""Helpers for tests of emulated clusters, and for finding what these leave behind.

``needs_namespaces`` skips a test if this machine allows no emulated cluster; ``Lab`` starts ``lab
cluster`` as a user does.
"""

import contextlib
import os
import subprocess
import sys
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
    """``lab cluster`` as a user starts it, with its own folder for temporary files."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *arguments):
        """Start ``lab cluster`` with these arguments and return at once."""
        process = subprocess.Popen(
            [sys.executable, "-m", "lab", "cluster", *map(str, arguments)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(self.temporary)},
        )
        self.started.append(process)
        return process

    def start_nodes(self, nodes, script, *flags):
        """Start ``lab cluster run`` with a shell script as each node's command."""
        flags = ("--nodes", nodes, *flags)
        return self.start("run", "--logs", self.folder, *flags, "--", "sh", "-c", script)

    def run(self, *arguments):
        """Run ``lab cluster`` with these arguments; return its exit status and output."""
        return self.end(self.start(*arguments))

    def end(self, process):
        """Wait for a process; return its exit status and output."""
        output, _ = process.communicate(timeout=LONG)
        return process.returncode, output

    def log(self, node):
        """Return the lines of a node's log; none if it has none yet."""
        path = self.folder / f"node{node}.log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def temporary(self):
        """The folder that receives temporary files."""
        return self.folder / "temporary"


def with_word(word, *, name=None):
    """Return the machine's processes with ``word`` in the command or as a variable's value.

    name : only those with this name.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if word in " ".join(process.cmdline()) or word in process.environ().values():
                found += [process.pid] * (name in (None, process.name()))
    return found


def traffic(cluster):
    """Return the bytes that each node has sent and received, by the bridge's ends of the links.

    What the ranks of a node send to each other passes no link.
    """
    found = {}
    for line in Path(f"/proc/{cluster.host_pid}/net/dev").read_text().splitlines():
        device, _, numbers = line.strip().partition(":")
        if device.startswith("veth"):
            columns = [int(number) for number in numbers.split()]
            # The bridge receives what the node sends.
            found[int(device.removeprefix("veth"))] = (columns[0], columns[8])
    return [found[node] for node in range(cluster.nodes)]


def networks(pids):
    """Return the network namespaces of these processes."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


@contextlib.contextmanager
def held_networks(pids):
    """Yield the network namespaces of these processes and keep them open.

    While they are open, no namespace of a later process can get the same name.
    """
    held = {}
    with contextlib.ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(OSError):
                file = stack.enter_context(Path(f"/proc/{pid}/ns/net").open())
                held[os.readlink(f"/proc/self/fd/{file.fileno()}")] = file
        yield set(held)
