"""``Cluster``: nodes with their own addresses on this machine. All its processes and links end with the ``with``.

Order: ``Cluster(...)`` as a context manager, ``start`` a command on nodes, perhaps ``fault``, ``wait``, and look at ``output``
and ``traffic``. The supervisor process (node_supervisor.py) does the work; channel.py talks to it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import GroupError, UserError
from common.utils.system import free_port
from lab.cluster import network, tools
from lab.cluster.channel import Channel
from lab.cluster.program import fill_in, node_environment
from lab.units import parse_latency, parse_rate

FAULTS = ("cut", "slow", "pause", "kill", "restore")
_POLL_SECONDS = 0.2
_KILLED_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"
_PORT = 29500


@dataclass(frozen=True)
class End:
    """How a node's program ended: its exit status, or minus the signal that killed it, and after how many seconds."""

    node: int
    status: int
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """What passed a node's link since it was made, headers of Ethernet included; packets are those of the kernel, up to 64 KB."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


class Cluster:
    """``nodes`` nodes on this machine.

    Parameters
    ----------
    rate, latency : of each node's link, as "200mbit" and "0.5ms"; None: without a limit, without a delay.
    logs : folder that receives ``node<r>.log``, unless ``start`` says otherwise.
    loopback : no namespaces, but processes on 127.0.0.1; then there is nothing to shape, cut or slow down.
    fresh : start each python by itself, instead of forking it from one that has imported torch.
    on_line : called with a node's number and each line that it writes.

    ``warnings`` says what the kernel cannot do. Raises UserError where the machine does not allow namespaces, with the setting to
    change.
    """

    def __init__(
        self,
        nodes: int,
        *,
        rate: str | None = None,
        latency: str | None = None,
        logs: Path = Path(),
        loopback: bool = False,
        fresh: bool = False,
        on_line: Callable[[int, str], object] | None = None,
    ) -> None:
        if not 1 <= nodes <= network.MOST_NODES:
            raise UserError(f"--nodes: got {nodes}, give 1 to {network.MOST_NODES}")
        self.nodes, self.loopback = nodes, loopback
        self.warnings: list[str] = []
        self._rate, self._latency = parse_rate(rate), parse_latency(latency)
        self._logs, self._on_line = logs, on_line
        self._fresh = fresh or sys.platform != "linux"  # elsewhere forks of torch may hang
        self._check(rate, latency)
        self._changed = threading.Condition()
        self._running: dict[int, float] = {}
        self._ends: list[End] = []
        self._output: dict[int, list[str]] = {node: [] for node in range(nodes)}
        self._files: dict[int, Any] = {}
        self._port = _PORT

    def _check(self, rate: str | None, latency: str | None) -> None:
        if self.loopback:
            if rate is not None or latency is not None:
                raise UserError(
                    "--loopback has no links: leave out --rate and --latency, or --loopback"
                )
            return
        if refused := tools.namespaces_refused():
            raise UserError(
                f"no emulated cluster here: {refused}. --loopback runs the same command on 127.0.0.1, unshaped"
            )
        if rate is not None and not tools.has_tbf():
            raise UserError(
                f"--rate {rate}: this kernel has no sch_tbf, which limits a link's rate: `sudo modprobe sch_tbf`, or "
                "leave it out"
            )
        if latency is not None and not tools.has_netem():
            self.warnings.append(
                f"--latency {latency} is left out: this kernel has no sch_netem (`sudo modprobe sch_netem`, "
                "where the module is installed); the links have their rate, and no delay of their own"
            )
            self._latency = None

    @property
    def latency_seconds(self) -> float | None:
        """What each link adds; None where nothing does, also where it was asked for and the kernel cannot."""
        return self._latency

    def __enter__(self) -> "Cluster":
        spec = {
            "nodes": self.nodes,
            "rate_bits": self._rate,
            "latency_seconds": self._latency,
            "loopback": self.loopback,
            "preload": not self._fresh,
        }
        self._channel = Channel(spec, on_line=self._take_line, on_end=self._take_end)
        try:
            self._channel.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, namespace and link of the cluster."""
        self._channel.close()
        for file in self._files.values():
            file.close()
        self._files = {}

    def address(self, node: int) -> str:
        """Return a node's address."""
        return _LOOPBACK if self.loopback else network.address(node)

    @property
    def host_pid(self) -> int:
        """The process, as seen from outside, whose namespaces are the cluster's."""
        return self._channel.host_pid

    def start(
        self,
        command: Sequence[str],
        *,
        nodes: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        logs: Path | None = None,
    ) -> None:
        """Start a command on each of ``nodes`` (default: all), its placeholders filled in, and return at once.

        environment : added to this process's own. logs : another folder for the output. Raises UserError on a placeholder that
        there is none of, and on a node that still runs something.
        """
        chosen = range(self.nodes) if nodes is None else nodes
        for node in chosen:
            self._check_node(node)
        if self.loopback and not self._running:  # those that join later use the same
            self._port = free_port()
        found = node_environment(
            dict(os.environ) | dict(environment or {}),
            nodes=self.nodes,
            interface=None if self.loopback else "eth0",
        )
        for node in chosen:
            filled = fill_in(
                command, master=self.address(0), nodes=self.nodes, rank=node, port=self._port
            )
            self._open_log(node, logs or self._logs)
            self._channel.ask(
                "start", node=node, command=filled, environment=found, folder=str(cwd or Path.cwd())
            )

    def _open_log(self, node: int, folder: Path) -> None:
        """Record that a node runs from now on, and open the file for its output."""
        path = self.log(node, folder)
        with self._changed:
            if node in self._running:
                raise UserError(
                    f"node {node} still runs what was started on it before: wait for it, or kill it"
                )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = path.open("a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written ({error.strerror}): give another folder"
                ) from error
            if node in self._files:
                self._files[node].close()
            self._files[node], self._running[node] = file, time.monotonic()

    def log(self, node: int, folder: Path | None = None) -> Path:
        """Return the file that a node's output goes to."""
        return (folder or self._logs) / f"node{node}.log"

    def fault(self, node: int, what: str, *, rate: str | None = None) -> None:
        """Hurt a node while it runs: "cut" or "slow" its link (to ``rate``), "pause" or "kill" its processes; "restore" undoes
        all but the last. Raises UserError on what cannot be."""
        self._check_node(node)
        if what not in FAULTS or (what == "slow") != (rate is not None):
            raise UserError(
                f"a fault is one of {', '.join(FAULTS)}; slow, and no other, needs a rate: got {what!r}, {rate!r}"
            )
        self._channel.ask("fault", node=node, fault=what, rate_bits=parse_rate(rate))

    def send_signal(self, number: int) -> None:
        """Send a signal to the program of every node, as Ctrl-C does to those of a terminal."""
        self._channel.ask("signal", signal=number)

    def traffic(self) -> dict[int, Traffic]:
        """Return what has passed each node's link so far. UserError on loopback, which has none."""
        if self.loopback:
            raise UserError("a cluster on loopback has no links to read")
        return {node: Traffic(*row) for node, row in enumerate(self._channel.ask("traffic"))}

    def pids(self, node: int) -> list[int]:
        """Return the process ids, as seen from outside, of what runs on a node. UserError on loopback."""
        self._check_node(node)
        if self.loopback:
            raise UserError("processes on loopback are not told apart by node")
        found = []
        for pid in self._channel.processes():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") == self._channel.networks[node]:
                    found.append(pid)
        return found

    def output(self, node: int) -> str:
        """Return what a node's programs have written so far, stdout and stderr."""
        with self._changed:
            return "\n".join(self._output[node])

    def wait(
        self,
        *,
        limit_seconds: float | None = None,
        stop_at_failure: bool = False,
        grace_seconds: float = 8.0,
    ) -> list[End]:
        """Wait until nothing runs any more; return how the programs started since the last wait ended, first the first.

        stop_at_failure : when one has failed, give the others ``grace_seconds`` to say why they end, too, and kill them then.
        Raises TimeoutError, naming the nodes, where some still run after ``limit_seconds``.
        """
        began, kill_at = time.monotonic(), None
        with self._changed:
            while self._running:
                now = time.monotonic()
                if self._channel.failure is not None:
                    raise GroupError(f"the cluster has ended: {self._channel.failure}")
                if limit_seconds is not None and now > began + limit_seconds:
                    raise TimeoutError(
                        f"after {limit_seconds:g} s these nodes still run: "
                        f"{', '.join(map(str, sorted(self._running)))}"
                    )
                if stop_at_failure and kill_at is None and any(end.status for end in self._ends):
                    kill_at = now + grace_seconds
                if kill_at is not None and now > kill_at:
                    still, kill_at = list(self._running), now + _KILLED_SECONDS
                    self._changed.release()
                    try:
                        self._kill(still)
                    finally:
                        self._changed.acquire()
                self._changed.wait(_POLL_SECONDS)
            ends, self._ends = self._ends, []
        return ends

    def _kill(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._channel.ask("fault", node=node, fault="kill", rate_bits=None)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise UserError(f"node {node}: the cluster has nodes 0 to {self.nodes - 1}")

    def _take_line(self, node: int, line: str) -> None:
        with self._changed:
            self._output[node].append(line)
            # Closed meanwhile, or a full disk: the run itself reports that.
            with contextlib.suppress(ValueError, OSError):
                self._files[node].write(line + "\n")
        if self._on_line is not None:
            self._on_line(node, line)

    def _take_end(self, node: int, status: int) -> None:
        with self._changed:
            self._ends.append(End(node, status, time.monotonic() - self._running.pop(node)))
            self._changed.notify_all()
