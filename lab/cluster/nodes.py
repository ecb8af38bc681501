"""The nodes of a running cluster, as every process of this user can reach them.

``lab cluster run`` writes ``Nodes`` into the environment of the process that it starts for the
cluster, which only this user may read, and which no file outlives. Other terminals find it there
with ``find_nodes``.
"""

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from functools import cached_property

import psutil

from common.errors import UserError
from common.utils.processes import descendants
from lab.cluster.network import ClusterNetwork, Link, namespace

FAULTS = ("cut", "slow", "pause", "kill", "restore")
_FACTS = "LAB_CLUSTER"


@dataclass(frozen=True)
class Nodes:
    """What other processes need to know about a cluster.

    Parameters
    ----------
    maker : the process that started the cluster, for example ``lab cluster run``.
    token : the secret by which rank 0 knows the ranks of this cluster.
    logs : folder of the nodes' output.
    process : what the maker started; with namespaces that is ``unshare``.
    ranks_per_node : programs that each node runs; ranks 0 to K - 1 run on node 0.
    """

    maker: int
    number: int
    token: str
    loopback: bool
    rate_bits: float | None
    latency_seconds: float | None
    logs: str
    process: int = 0
    ranks_per_node: int = 1

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which others find these nodes."""
        return {_FACTS: json.dumps(asdict(self))}

    @cached_property
    def host_pid(self) -> int:
        """The first process in the namespaces, as seen from outside."""
        if self.loopback:
            return self.process
        started = descendants(self.process)  # by ``unshare``; parents come first
        return started[0] if started else self.process

    @property
    def network(self) -> ClusterNetwork:
        """The network of the nodes; on loopback there is none."""
        return ClusterNetwork(self.host_pid)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def pids(self, node: int) -> list[int]:
        """Return the processes on a node, as seen from outside."""
        if not self.loopback:
            return self.network.pids(node)
        found = []
        for parent in psutil.Process(self.host_pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if parent.name() == namespace(node):
                    found += descendants(parent.pid)
        return found

    def fault(self, node: int, what: str, rate_bits: float | None) -> None:
        """Disturb a node, see ``Cluster.fault``."""
        if self.loopback and what in ("cut", "slow"):
            raise UserError(
                f"a node on loopback has no link of its own to {what}: start the cluster without "
                "--loopback"
            )
        match what:
            case "cut":
                self.network.set_link(node, "down")
            case "slow":
                self.network.shape(node, Link(rate_bits, self.latency_seconds))
            case "restore" if not self.loopback:
                self.network.set_link(node, "up")
                self.network.shape(node, Link(self.rate_bits, self.latency_seconds))
        signals = {"pause": signal.SIGSTOP, "kill": signal.SIGKILL, "restore": signal.SIGCONT}
        if what in signals:
            self._signal(node, signals[what])

    def _signal(self, node: int, number: int) -> None:
        """Signal every process of a node, until no new ones appear."""
        known: set[int] = set()
        # The ranks' programs are first: they might see a child killed, and end by themselves.
        while new := [pid for pid in self.pids(node) if pid not in known]:
            known |= {*new}
            for pid in new:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)


def find_nodes(maker: int | None) -> Nodes:
    """Return the nodes of a cluster of this user: that of process ``maker``, or the only one.

    Raises UserError if there is none, or if several run and ``maker`` is none of them.
    """
    if sys.platform != "linux":
        raise UserError(
            f"a running cluster can be reached only on Linux, and this is {sys.platform}"
        )
    found: dict[int, Nodes] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            facts = json.loads(process.environ().get(_FACTS, "{}"))
            if process.uids().real == os.getuid() and facts.get("maker") == process.ppid():
                facts |= {"process": process.pid}
                found[process.ppid()] = Nodes(**facts)
    if not found:
        raise UserError(
            "none of your clusters is running: "
            "start one in another terminal with lab cluster run --nodes 4 -- COMMAND"
        )
    if maker is None and len(found) == 1:
        return next(iter(found.values()))
    if maker not in found:
        got = "several clusters are running" if maker is None else f"--cluster: got {maker}"
        raise UserError(
            f"{got}: give --cluster, one of {', '.join(map(str, sorted(found)))} "
            "(process ids of lab cluster run)"
        )
    return found[maker]
