"""``Cluster``: nodes with their own addresses on this machine, for a ``with`` statement.

Order: enter the ``with``, ``start`` a command on nodes, perhaps ``fault``, ``wait``, and read
``output`` and ``traffic``. All processes and links end with the ``with``. channel.py starts the
process that does the work.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import GroupError, UserError
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.system import free_port
from lab.cluster import network, tools
from lab.cluster.channel import Channel
from lab.cluster.network import Link
from lab.cluster.program import fill_in, node_environment
from lab.units import parse_latency, parse_rate

FAULTS = ("cut", "slow", "pause", "kill", "restore")
_POLL_SECONDS = 0.2
_PORT = 29500


@dataclass(frozen=True)
class End:
    """How a node's program ended: its status, or minus a signal's number, and after how long."""

    node: int
    status: int
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """What a node has sent and received, see ``network.traffic``."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


class Cluster:
    """A number of nodes on this machine.

    Parameters
    ----------
    rate, latency : of each node's link, e.g. "200mbit" and "0.5ms"; None: no limit, no delay.
    logs : folder for ``node<r>.log``, unless ``start`` gets another.
    loopback : processes on 127.0.0.1, without namespaces: no link to shape, cut or slow down.
    fresh : start each Python program in a new interpreter. By default it is forked from a process
        that has imported torch.
    on_line : called in a thread with a node's number and each line that it writes.

    ``warnings`` lists what the kernel cannot do. ``latency_seconds`` is the delay that each link
    adds; None if none. ``host_pid`` is the first process in the cluster's namespaces, as seen from
    outside. ``token`` is the secret by which rank 0 knows the ranks of this cluster.
    Raises UserError, with the setting to change, if the machine allows no namespaces.
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
        on_line: Callable[[int, str], object] = lambda node, line: None,
    ) -> None:
        if not 1 <= nodes <= network.MOST_NODES:
            raise UserError(f"--nodes: got {nodes}, give 1 to {network.MOST_NODES}")
        self.nodes, self.loopback = nodes, loopback
        self.warnings: list[str] = []
        self._rate_bits, self.latency_seconds = parse_rate(rate), parse_latency(latency)
        self._logs, self._on_line = logs, on_line
        self._preload = not fresh and sys.platform == "linux"  # elsewhere forks of torch may hang
        self._check(rate, latency)
        self._program_ended = threading.Event()
        self._running: dict[int, tuple[float, IO[str]]] = {}  # start, and file for the output
        self._names: dict[int, str] = {}  # "node 2", or "node 2, rank 2," if it knows its rank
        self._kill_reasons: dict[int, str] = {}
        self._ends: list[End] = []
        self._output: dict[int, list[str]] = {node: [] for node in range(nodes)}
        self._port = _PORT
        self.token = with_run_token(os.environ)[RUN_TOKEN]

    def _check(self, rate: str | None, latency: str | None) -> None:
        if self.loopback:
            if rate is not None or latency is not None:
                raise UserError(
                    "--loopback has no links: remove --rate and --latency, or remove --loopback"
                )
            return
        if refused := tools.namespaces_refused():
            raise UserError(
                f"this machine cannot emulate a cluster: {refused}. "
                "--loopback runs the same command on 127.0.0.1, without links"
            )
        if rate is not None and not tools.has_tbf():
            raise UserError(
                f"--rate {rate}: this kernel cannot limit a link's rate (no sch_tbf): "
                "`sudo modprobe sch_tbf`, or remove --rate"
            )
        if latency is not None and not tools.has_netem():
            self.warnings.append(
                f"--latency {latency} is ignored: this kernel has no sch_netem "
                "(`sudo modprobe sch_netem`, if the module is installed); "
                "the links have their rate, but no added delay"
            )
            self.latency_seconds = None

    def __enter__(self) -> "Cluster":
        self._channel = Channel(loopback=self.loopback, on_event=self._take_event)
        link = None if self.loopback else Link(self._rate_bits, self.latency_seconds)
        try:
            self._channel.build(self.nodes, link, preload=self._preload)
            self.host_pid = self._channel.host_pid
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, namespace and link of the cluster."""
        self._channel.close()
        for _, log in self._running.values():
            log.close()

    def address(self, node: int) -> str:
        """Return a node's address."""
        return "127.0.0.1" if self.loopback else network.address(node)

    def start(
        self,
        command: Sequence[str],
        *,
        nodes: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        logs: Path | None = None,
    ) -> None:
        """Start a command on each of ``nodes`` (default: all), and return at once.

        The command's placeholders are filled in. ``environment`` is added to this process's own.
        ``logs`` is another folder for the output. Raises UserError for an unknown placeholder, and
        for a node on which a program still runs.
        """
        chosen = range(self.nodes) if nodes is None else nodes
        for node in chosen:
            self._check_node(node)
        if self.loopback and not self._running:  # nodes that join later use the same port
            self._port = free_port(address="127.0.0.1")
        node_variables = node_environment(
            {**os.environ, RUN_TOKEN: self.token, **(environment or {})},
            nodes=self.nodes,
            interface=None if self.loopback else "eth0",
        )
        for node in chosen:
            filled = fill_in(
                command, master=self.address(0), nodes=self.nodes, rank=node, port=self._port
            )
            if node in self._running:
                raise UserError(
                    f"node {node} still runs the previous command: wait for it, or kill it"
                )
            has_rank = any("{rank}" in word for word in command)
            self._names[node] = f"node {node}{f', rank {node},' if has_rank else ''}"
            self._running[node] = time.monotonic(), _open_log(self.log(node, logs))
            self._channel.ask("start", node, filled, node_variables, str(cwd or Path.cwd()))

    def log(self, node: int, folder: Path | None = None) -> Path:
        """Return the file for a node's output; it ends with the reason if a signal killed it."""
        return (folder or self._logs) / f"node{node}.log"

    def fault(self, node: int, what: str, *, rate: str | None = None) -> None:
        """Disturb a node while it runs.

        "cut" disconnects its link, "slow" gives the link another ``rate``, "pause" stops its
        processes, "kill" kills them, "restore" undoes all but "kill". Raises UserError for any
        other fault, and for a link on loopback.
        """
        self._check_node(node)
        if what not in FAULTS or (what == "slow") != (rate is not None):
            raise UserError(
                f"fault: got {what!r} with rate {rate!r}; choose from {', '.join(FAULTS)}, and "
                "give a rate with slow only"
            )
        if what == "kill":
            self._kill_reasons.setdefault(node, "was killed by SIGKILL: lab cluster fault --kill")
        self._channel.ask("fault", node, what, parse_rate(rate))

    def send_signal(self, number: int) -> None:
        """Send a signal to the program of every node, as Ctrl-C does to those of a terminal."""
        self._channel.ask("send_signal", number)

    def traffic(self) -> dict[int, Traffic]:
        """Return what each node has sent and received. Raises UserError on loopback."""
        if self.loopback:
            raise UserError("a cluster on loopback has no links, so no traffic is counted")
        rows = self._channel.ask("traffic", self.nodes)
        return {node: Traffic(*row) for node, row in enumerate(rows)}

    def pids(self, node: int) -> list[int]:
        """Return the process ids of what runs on a node, as seen from outside.

        Raises UserError on loopback.
        """
        self._check_node(node)
        if self.loopback:
            raise UserError("a cluster on loopback does not know which node a process belongs to")
        return self._channel.pids(node)

    def output(self, node: int) -> str:
        """Return what a node's programs have written so far, stdout and stderr."""
        return "\n".join(self._output[node])

    def wait(
        self,
        *,
        limit_seconds: float = math.inf,
        stop_at_failure: bool = False,
        grace_seconds: float = 8.0,
    ) -> list[End]:
        """Wait until nothing runs; return the ends since the last ``wait``, the earliest first.

        stop_at_failure : after the first failure, give the other nodes ``grace_seconds`` to report
            why they end, too; then kill them.
        Raises TimeoutError with the nodes that still run after ``limit_seconds``, GroupError if the
        cluster has ended.
        """
        began, kill_at = time.monotonic(), math.inf
        while self._running:
            now = time.monotonic()
            if self._channel.failure is not None:
                raise GroupError(f"the cluster has ended: {self._channel.failure}")
            if now > began + limit_seconds:
                raise TimeoutError(
                    f"after {limit_seconds:g} s these nodes still run: "
                    f"{', '.join(map(str, sorted(self._running)))}"
                )
            if stop_at_failure and any(end.status for end in self._ends):
                kill_at = min(kill_at, now + grace_seconds)
            if now > kill_at:
                first = self._names[next(end.node for end in self._ends if end.status)]
                for node in list(self._running):
                    self._kill_reasons[node] = f"was stopped, since {first} had failed"
                    self.fault(node, "kill")
                kill_at = math.inf  # set anew above: kills what still runs after the same time
            self._program_ended.wait(_POLL_SECONDS)
            self._program_ended.clear()
        ends, self._ends = self._ends, []
        return ends

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise UserError(f"node {node}: the cluster has nodes 0 to {self.nodes - 1}")

    def _take_event(self, node: int, event: str | int) -> None:
        """Record a line that a node has written, or the exit status of its program."""
        began, log = self._running[node]
        if isinstance(event, str):
            self._output[node].append(event)
            with contextlib.suppress(OSError):  # a full disk: the run itself reports it
                log.write(event + "\n")
            self._on_line(node, event)
        else:
            reason = self._kill_reasons.pop(node, None)
            with contextlib.suppress(OSError):
                if event < 0:  # a killed program cannot report its own end
                    reason = reason or f"was killed by {signal.Signals(-event).name}"
                    log.write(f"lab cluster: {self._names[node]} {reason}\n")
                log.close()
            self._ends.append(End(node, event, time.monotonic() - began))
            del self._running[node]  # after the end is recorded: ``wait`` reads both
            self._program_ended.set()


def _open_log(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): give another folder"
        ) from error
