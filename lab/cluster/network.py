"""The network of an emulated cluster: a bridge, and a namespace with one link to it for each node.

``ClusterNetwork`` works from outside: it runs the system's ``ip`` and ``tc`` in the namespaces.
"""

import contextlib
import itertools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.errors import UserError
from common.utils.processes import how_ended
from lab.cluster import tools
from lab.fleet.namespaces import enter_namespace, enter_words

MOST_NODES = 250
_BRIDGE = "lab0"
_COMMAND_SECONDS = 30.0
_HOSTS = Path("/etc/hosts")
_OWN_HOSTS = Path("/run/hosts")


@dataclass(frozen=True)
class Link:
    """Rate (bits per second) and one-way latency (seconds) of a node's link; None: not limited."""

    rate_bits: float | None = None
    latency_seconds: float | None = None


def address(node: int) -> str:
    """Return a node's IP address."""
    return f"10.9.0.{node + 1}"


def namespace(node: int) -> str:
    """Return the name of a node's network namespace and host."""
    return f"node{node}"


def namespace_file(node: int) -> Path:
    """Return the file of a node's network namespace; it exists inside the cluster only."""
    return Path("/run/netns", namespace(node))


@dataclass(frozen=True)
class ClusterNetwork:
    """The network of the cluster whose first process has this id, as seen from outside.

    Methods raise UserError with the error output of ``ip`` or ``tc``.
    """

    host_pid: int

    def build(self, nodes: int, link: Link) -> None:
        """Make the bridge, the namespaces and the links, and add the nodes to ``/etc/hosts``.

        The kernel removes everything when the last process in the namespaces ends.
        """
        self._run("mount", "-t", "tmpfs", "tmpfs", "/run")
        adds = [f"ip netns add {namespace(node)}" for node in range(nodes)]
        self._run("sh", "-c", " && ".join(adds))
        links = [
            (
                f"link add {_bridge_end(node)} type veth peer name eth0 netns {namespace(node)}",
                f"link set {_bridge_end(node)} addrgenmode none",
                f"link set {_bridge_end(node)} master {_BRIDGE} up",
            )
            for node in range(nodes)
        ]
        self._ip(
            f"link add {_BRIDGE} type bridge",
            f"link set {_BRIDGE} addrgenmode none",
            f"link set {_BRIDGE} up",
            "link set lo up",
            *itertools.chain(*links),
        )
        for node in range(nodes):
            self._ip(
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"address add {address(node)}/24 dev eth0",
                "link set eth0 up",
                node=node,
            )
            self._limit(node, link)
        names = "".join(f"{address(node)} {namespace(node)}\n" for node in range(nodes))
        self._inside(_OWN_HOSTS).write_bytes(_HOSTS.read_bytes() + names.encode())
        self._run("mount", "--bind", str(_OWN_HOSTS), str(_HOSTS))

    def shape(self, node: int, link: Link) -> None:
        """Give a node's link another rate and latency."""
        for tc, device in _ends(node):
            self._run(*f"{tc} delete dev {device} root".split(), may_fail=True)
        self._limit(node, link)

    def _limit(self, node: int, link: Link) -> None:
        """Give a node's new link its rate both ways, and its latency where the node sends.

        The kernel shapes only what a device sends: the node's end limits what the node sends, and
        the bridge's end what it receives. Every packet has one sender, so the latency counts once.
        """
        # tbf passes packets of up to 64 KB; a smaller burst would cost a third of the rate.
        limit = []
        if link.rate_bits is not None:
            burst = "256kb" if link.rate_bits >= 500e6 else "128kb"
            limit.append(f"tbf rate {link.rate_bits:.0f}bit burst {burst} limit 2mb")
        delay = []
        if link.latency_seconds is not None:
            delay.append(f"netem delay {link.latency_seconds * 1e6:.0f}us limit 100000")
        for (tc, device), disciplines in zip(_ends(node), (limit + delay, limit), strict=True):
            positions = ("root handle 1:", "parent 1: handle 2:")
            for discipline, position in zip(disciplines, positions, strict=False):
                self._run(*f"{tc} add dev {device} {position} {discipline}".split())

    def set_link(self, node: int, state: str) -> None:
        """Turn a node's link "up" or "down" at the bridge; when down, it drops packets silently."""
        self._ip(f"link set {_bridge_end(node)} {state}")

    def pids(self, node: int) -> list[int]:
        """Return the processes on a node, as seen from outside."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self._inside(namespace_file(node)).samefile(f"/proc/{pid}/ns/net"):
                    found.append(pid)
        return found

    def enter(self, node: int) -> None:
        """Move this process into a node, and its children to the cluster's process ids.

        Raises OSError if the kernel refuses.
        """
        for kind in ("user", "pid", "mnt"):  # mnt hides this /proc, and shows the nodes' networks
            path = Path(f"/proc/{self.host_pid}/ns/{kind}")
            if not path.samefile(f"/proc/self/ns/{kind}"):
                enter_namespace(path)
        enter_namespace(namespace_file(node))

    def _inside(self, path: Path) -> Path:
        """Return where a file of the cluster's own is as seen from outside."""
        return Path(f"/proc/{self.host_pid}/root{path}")

    def _ip(self, *lines: str, node: int | None = None) -> None:
        """Run lines of ``ip`` commands, in a node's namespace if ``node`` is given."""
        inside = [] if node is None else ["-netns", namespace(node)]
        self._run("ip", *inside, "-batch", "-", stdin="\n".join(lines))

    def _run(self, *command: str, stdin: str = "", may_fail: bool = False) -> str:
        """Run a command in the cluster's namespaces, on the bridge, and return its output."""
        enter = enter_words(self.host_pid, "--mount", "--pid", "--net")
        done = subprocess.run(
            [*enter, *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            env=os.environ | {"PATH": tools.search_path()},
        )
        if done.returncode and not may_fail:
            why = done.stderr.strip() or f"it {how_ended(done.returncode)}"
            raise UserError(f"`{' '.join(command)}` failed: {why}")
        return done.stdout


def _bridge_end(node: int) -> str:
    return f"veth{node}"


def _ends(node: int) -> list[tuple[str, str]]:
    """Return ``tc`` and the device of the node's end of its link, and of the bridge's end."""
    return [(f"tc -netns {namespace(node)} qdisc", "eth0"), ("tc qdisc", _bridge_end(node))]
