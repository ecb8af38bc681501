"""Run hosts with a real sshd on an emulated cluster; tests need only ``Machines``.

Node 0 is the terminal where the user types ``lab``; nodes 1 to 3 run sshd. Each host has its own
keys and, at the same path, its own checkout, as if on its own disk. Processes, networks, mounts and
files disappear when the ``with`` block ends.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from lab.cluster import Cluster, tools
from tests.helpers import LONG, ROOT, wait_until

HOSTS = ("node1", "node2", "node3")
SSHD = shutil.which("sshd", path=tools.search_path())
_COPIED = ("common", "lab", "PartOne", "PartTwo", "PartThree", "recipes")
_SERVER = """\
HostKey {keys}/host{node}
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """\
Host *
  IdentityFile {keys}/user
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {keys}/known_hosts
  GlobalKnownHostsFile none
  UpdateHostKeys no
"""
_ENTER = (
    "import json, subprocess, sys; from common.utils.processes import shell_status; "
    "from lab.cluster.network import ClusterNetwork; host, command = json.loads(sys.argv[1]); "
    "ClusterNetwork(host).enter(0); sys.exit(shell_status(subprocess.call(command)))"
)


def missing():
    """Return why this machine cannot run such hosts, or None if it can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "sshd and ssh are not installed (packages openssh-server and openssh-client)"
    if os.geteuid() != 0:
        return "sshd changes users, which only root may"
    return tools.namespaces_refused()


class Machines:
    """Three hosts with sshd, and a terminal; ``folder`` receives all their files."""

    def __init__(self, folder):
        self.folder = folder
        self.keys, self.checkout = folder / "keys", folder / "checkout"
        self.config = folder / "ssh_config"
        self.cluster = Cluster(1 + len(HOSTS), logs=folder / "nodes", fresh=True)
        self.started: list[subprocess.Popen] = []

    def __enter__(self):
        self.keys.mkdir(parents=True)
        self.checkout.mkdir()
        self._make_keys()
        nodes = range(1, len(HOSTS) + 1)
        for node in nodes:
            self._make_checkout(self.own_checkout(node))
            (self.folder / f"sshd{node}").write_text(_SERVER.format(keys=self.keys, node=node))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.cluster)
            for node in nodes:
                self._start_sshd(node)
            listen = "Server listening"
            wait_until(lambda: all(listen in self.cluster.output(one) for one in nodes), listen)
            stack.pop_all()
        return self

    def __exit__(self, *_error):
        self.end_commands()
        self.cluster.close()

    def _make_keys(self):
        for name in ("user", "stranger", *(f"host{node}" for node in range(1, len(HOSTS) + 1))):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name]
            words += ["-f", str(self.keys / name)]
            subprocess.run(words, check=True, timeout=LONG, stdin=subprocess.DEVNULL)
        known = [
            f"{name},{self.cluster.address(node)} {(self.keys / f'host{node}.pub').read_text()}"
            for node, name in enumerate(HOSTS, start=1)
        ]
        (self.keys / "known_hosts").write_text("".join(known))
        self.config.write_text(_CLIENT.format(keys=self.keys))

    def own_checkout(self, node):
        """Return where a host's disk is as seen from outside; the host sees it at ``checkout``."""
        return self.folder / f"disk{node}"

    def _make_checkout(self, disk):
        disk.mkdir()
        for name in _COPIED:
            shutil.copytree(ROOT / name, disk / name, ignore=shutil.ignore_patterns("__pycache__"))
        (disk / ".venv").symlink_to(Path(sys.prefix))

    def _start_sshd(self, node):
        """Start a host's sshd, with its own disk mounted at the path that all hosts share."""
        script = (
            f"mkdir -p /run/sshd && mount --bind {self.own_checkout(node)} {self.checkout} && "
            f"exec {SSHD} -D -e -f {self.folder}/sshd{node}"
        )
        self.cluster.start(["unshare", "--mount", "sh", "-c", script], ranks=[node])

    def start(self, *arguments, config=None):
        """Start a ``lab`` subcommand at the terminal, with the flags that locate the hosts."""
        words = [str(one) for one in arguments]
        ways = ["--ssh-config", str(config or self.config)]
        if "--hosts" in words and "--workdir" not in words:
            ways += ["--workdir", str(self.checkout)]
        return self.enter([sys.executable, "-m", "lab", words[0], *ways, *words[1:]])

    def enter(self, command):
        """Start a command at the terminal."""
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTER, json.dumps([self.cluster.host_pid, list(command)])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PATH": tools.search_path()},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, config=None):
        """Run a ``lab`` subcommand at the terminal; return its exit status and output."""
        process = self.start(*arguments, config=config)
        output, _ = process.communicate(timeout=LONG)
        return process.returncode, output

    def lab_pid(self, process):
        """Return the id of the ``lab`` process; ``process`` itself only enters the network."""
        wait_until(lambda: psutil.Process(process.pid).children(), "lab is started")
        return psutil.Process(process.pid).children()[0].pid

    def running(self, node):
        """Return the commands that run on a host, by process id, except the listening sshd."""
        found = {}
        for pid in self.cluster.pids(node):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                command = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and "[listener]" not in command:
                    found[pid] = command
        return found

    def end_commands(self):
        """Kill the terminal's commands that still run."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LONG)
        self.started.clear()
