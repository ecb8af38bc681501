"""``Cluster``: nodes with their own addresses on this machine, for a ``with`` statement.

Order: enter the ``with``, ``start`` a command on nodes, perhaps ``fault``, ``wait``, and read
``output``. All processes and links end with the ``with``. supervisor.py starts the programs;
nodes.py is what other terminals know about a cluster.
"""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from common.errors import GroupError, UserError
from common.say import count
from common.utils.atomic_files import append_text
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.paths import REPOSITORY
from common.utils.processes import SAVE_SECONDS, how_ended, start_child, wait_for_ranks
from common.utils.system import free_port
from lab.cluster import network, tools
from lab.cluster.network import Link
from lab.cluster.nodes import FAULTS, Nodes
from lab.cluster.program import fill_in, node_environment
from lab.cluster.supervisor import NodeProgram
from lab.fleet.prefixed_output import log_name, write_log
from lab.fleet.supervision import kill_descendants
from lab.units import parse_latency, parse_rate

# For ``python -P -c``, with the repository as argument, so that it need not be installed.
SUPERVISOR_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from lab.cluster.supervisor import main; main()"
)

_READY_SECONDS = 180.0  # for the supervisor to import torch
_CLOSE_SECONDS = 10.0
_PORT = 29500


@dataclass
class RankProgram:
    """A rank's program, as it is followed from here.

    name : "node 2", or "node 2, rank 2," if it knows its rank.
    control : takes signals for it, and gives its exit status.
    stopped : why ``wait`` has stopped it; "" if it has not.
    began, ended : when, by time.monotonic().
    status : its exit status, or minus a signal's number; None while it runs.
    """

    rank: int
    node: int
    name: str
    log: Path
    control: socket.socket
    began: float
    stopped: str = ""
    ended: float = math.inf
    status: int | None = None

    @property
    def seconds(self) -> float:
        """How long it has run; infinite while it runs."""
        return self.ended - self.began

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self.control.send(bytes([number]))


class Cluster:
    """A number of nodes on this machine.

    Parameters
    ----------
    ranks_per_node : programs that each node runs. They share its address and its link, and reach
        each other inside the node. Ranks count through the nodes.
    rate, latency : of each node's link, e.g. "200mbit" and "0.5ms"; None: no limit, no delay.
    logs : folder for ``node<r>.log``, unless ``start`` gets another; with several ranks on a node
        for ``node<n>-rank<r>.log``.
    loopback : processes on 127.0.0.1, without namespaces: no link to shape, cut or slow down.
    fresh : start each Python program in a new interpreter. By default it is forked from a process
        that has imported torch.
    on_line : called in a thread with a rank and each line that it writes.

    ``warnings`` lists what the kernel cannot do. ``latency_seconds`` is the delay that each link
    adds; None if none. ``host_pid`` is the first process in the cluster's namespaces, as seen from
    outside. ``token`` is the secret by which rank 0 knows the ranks of this cluster.
    Raises UserError, with the setting to change, if the machine allows no namespaces.
    """

    def __init__(
        self,
        nodes: int,
        *,
        ranks_per_node: int = 1,
        rate: str | None = None,
        latency: str | None = None,
        logs: Path = Path(),
        loopback: bool = False,
        fresh: bool = False,
        on_line: Callable[[int, str], object] = lambda rank, line: None,
    ) -> None:
        if not 1 <= nodes <= network.MOST_NODES:
            raise UserError(f"--nodes: got {nodes}, give 1 to {network.MOST_NODES}")
        most = network.MOST_NODES // nodes  # a rank takes as much memory as a node of one rank
        if not 1 <= ranks_per_node <= most:
            raise UserError(
                f"--ranks-per-node: got {ranks_per_node}, give 1 to {most}: {count(nodes, 'node')} "
                f"may have at most {network.MOST_NODES} ranks in all"
            )
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.ranks = nodes * ranks_per_node
        self.loopback = loopback
        self.warnings: list[str] = []
        self._rate_bits = parse_rate(rate)
        self.latency_seconds = parse_latency(latency)
        self.logs = logs
        self._on_line = on_line
        self._preload = not fresh and sys.platform == "linux"  # elsewhere forks of torch may hang
        self._check(rate, latency)
        self._threads: list[threading.Thread] = []
        self._programs: list[RankProgram] = []  # since the last ``wait``
        # By rank; a node with one rank has its number.
        self._output: dict[int, list[str]] = {rank: [] for rank in range(self.ranks)}  # lines
        self._port = _PORT  # of the ranks' store on node 0
        self.token = with_run_token(os.environ)[RUN_TOKEN]
        self._nodes = Nodes(
            os.getpid(),
            nodes,
            self.token,
            loopback,
            self._rate_bits,
            self.latency_seconds,
            str(logs.absolute()),
            ranks_per_node=ranks_per_node,
        )

    def _check(self, rate: str | None, latency: str | None) -> None:
        """Raise UserError if this machine cannot make such links; a latency may only be ignored."""
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
        own = replace(self._nodes, logs=str(self.logs.absolute()))
        self._errors = tempfile.TemporaryFile()
        self._requests, requests = Pipe()
        with requests:
            self._process = start_child(
                [
                    *(() if self.loopback else tools.unshare_command() or ()),
                    *(sys.executable, "-P", "-c", SUPERVISOR_CODE, str(REPOSITORY)),
                    *(["preload"] if self._preload else []),
                ],
                stdin=requests.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", **own.variables()},
            )
        self._nodes = replace(own, process=self._process.pid)
        try:
            self._await_supervisor()  # it runs
            self.host_pid = self._nodes.host_pid
            if not self.loopback:
                link = Link(self._rate_bits, self.latency_seconds)
                self._nodes.network.build(self.nodes, link)
            self._await_supervisor()  # it has imported torch meanwhile
        except BaseException as error:
            with contextlib.closing(self):  # ends what has started
                if isinstance(error, Exception):
                    why = error if isinstance(error, UserError) else self._why_ended()
                    raise GroupError(f"the cluster did not start: {why}") from error
                raise
        return self

    def _await_supervisor(self) -> None:
        """Wait for the supervisor's next message, of the two that it sends while it starts."""
        if not self._requests.poll(_READY_SECONDS):
            raise UserError(f"not ready within {_READY_SECONDS:g} s")
        self._requests.recv()

    def _why_ended(self) -> str:
        """Return why the supervisor has ended: the last line that it or unshare has written."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace").strip().splitlines()
        last = errors[-1] if errors else "its first process has ended"
        return re.sub(r"^unshare: ", "unshare says: ", last)

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, namespace and link of the cluster."""
        self.send_signal(signal.SIGKILL)
        self._requests.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait(_CLOSE_SECONDS)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._errors.close()

    def address(self, node: int) -> str:
        """Return a node's address."""
        return "127.0.0.1" if self.loopback else network.address(node)

    def start(
        self,
        command: Sequence[str],
        *,
        ranks: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        logs: Path | None = None,
    ) -> None:
        """Start a command for each of ``ranks`` (default: all), and return at once.

        environment : added to this process's own. logs : another folder for the output. The
        command's placeholders are filled in.

        Raises UserError for an unknown placeholder, and for a rank whose program still runs.
        """
        chosen = range(self.ranks) if ranks is None else ranks
        for rank in chosen:
            self._check_idle(rank)
        if self.loopback and not self._running():  # nodes that join later use the same port
            self._port = free_port(address="127.0.0.1")
        variables = node_environment(
            {**os.environ, RUN_TOKEN: self.token, **(environment or {})},
            ranks=self.ranks,
            interface=None if self.loopback else "eth0",
        )
        folder = str(cwd or Path.cwd())
        for rank in chosen:
            filled = fill_in(
                command,
                master=self.address(0),
                nodes=self.ranks,
                rank=rank,
                port=self._port,
                ranks_per_node=self.ranks_per_node,
            )
            node = rank // self.ranks_per_node
            program = NodeProgram(rank, self.ranks, node, self.loopback, filled, variables, folder)
            self._start(program, self._name_in(command, rank), self.log(rank, logs))

    def _check_idle(self, rank: int) -> None:
        """Raise UserError unless there is such a rank, and nothing of it runs."""
        self._check_node(rank // self.ranks_per_node)
        if any(program.rank == rank for program in self._running()):
            raise UserError(
                f"{self._name(rank)} still runs the previous command: wait for it, or kill it"
            )

    def _name_in(self, command: Sequence[str], rank: int) -> str:
        """Return what a message calls a rank's program: with its rank, if it knows its rank."""
        name = self._name(rank)
        if self.ranks_per_node > 1:
            return f"{name},"
        return f"{name}, rank {rank}," if any("{rank}" in word for word in command) else name

    def _name(self, rank: int) -> str:
        """Return a rank's name for a person: "node 2", or "node 1, rank 2"."""
        if self.ranks_per_node == 1:
            return f"node {rank}"
        return f"node {rank // self.ranks_per_node}, rank {rank}"

    def _running(self) -> list[RankProgram]:
        return [program for program in self._programs if program.status is None]

    def _start(self, request: NodeProgram, name: str, log: Path) -> None:
        """Send a program to the supervisor, and follow it in a thread.

        The supervisor gets a socket, by which signals go and the exit status comes, and a pipe for
        the program's output.
        """
        append_text(log, "", name=str(log), advice=": give another folder")
        control, far = socket.socketpair()
        reader, writer = os.pipe()
        try:
            self._requests.send(request)
            for descriptor in (far.fileno(), writer):
                send_handle(self._requests, descriptor, self._process.pid)
        except OSError as error:
            raise GroupError(f"the cluster has ended: {self._why_ended()}") from error
        finally:
            far.close()
            os.close(writer)
        program = RankProgram(
            request.rank, request.node, name, log, control, began=time.monotonic()
        )
        self._programs.append(program)
        follow = partial(self._follow, program, reader)
        self._threads.append(threading.Thread(target=follow, daemon=True))
        self._threads[-1].start()

    def _follow(self, program: RankProgram, output: int) -> None:
        """Record what a rank writes and how its program ends; in a thread."""
        with (
            program.control,
            open(output, encoding="utf-8", errors="replace", newline="\n") as lines,
        ):
            for text in lines:
                line = text.rstrip("\n")
                self._output[program.rank].append(line)
                write_log(program.log, line)
                self._on_line(program.rank, line)
            try:
                status = int(program.control.recv(16))
            except (OSError, ValueError):  # its parent was killed, most likely with the cluster
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                status = -signal.SIGKILL
        if status < 0:  # a killed program cannot report its own end
            reason = program.stopped or how_ended(status)
            write_log(program.log, f"lab cluster: {program.name} {reason}")
        program.ended = time.monotonic()
        program.status = status

    def log(self, rank: int, folder: Path | None = None) -> Path:
        """Return the file for a rank's output; it ends with the reason if a signal killed it."""
        return (folder or self.logs) / log_name(rank, self.ranks_per_node)

    def fault(self, node: int, what: str, *, rate: str | None = None) -> None:
        """Disturb a node, with all its ranks, while it runs.

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
        self._nodes.fault(node, what, parse_rate(rate))

    def send_signal(self, number: int) -> None:
        """Send a signal to the program of every rank, as Ctrl-C does to those of a terminal."""
        for program in self._running():
            program.send_signal(number)

    def pids(self, node: int) -> list[int]:
        """Return the process ids of what runs on a node, as seen from outside."""
        self._check_node(node)
        return self._nodes.pids(node)

    def output(self, rank: int) -> str:
        """Return what a rank's programs have written so far, stdout and stderr."""
        return "\n".join(self._output[rank])

    def wait(
        self,
        *,
        limit_seconds: float = math.inf,
        grace_seconds: float = math.inf,
        received: Callable[[], Sequence[int]] = lambda: (),
    ) -> list[RankProgram]:
        """Wait until nothing runs; return what has ended since the last ``wait``, in that order.

        grace_seconds : after the first failure, give the other ranks so long to report why they
            end, too; then kill them.
        received : returns the signals that have come; see ``wait_for_ranks``.
        Raises TimeoutError with those that still run after ``limit_seconds``, GroupError if the
        cluster has ended.
        """
        failed = wait_for_ranks(
            self._statuses,
            limit_seconds=limit_seconds,
            grace_seconds=grace_seconds,
            save_seconds=max(SAVE_SECONDS, grace_seconds),
            received=received,
            pass_on=self.send_signal,
        )
        if received():
            self._stop_running("was stopped, since it did not end after a signal")
        elif failed and grace_seconds < math.inf:
            first = self._programs[failed[0]].name
            self._stop_running(f"was stopped, since {first} had failed")
        if running := sorted(program.rank for program in self._running()):
            who = "nodes" if self.ranks_per_node == 1 else "ranks"
            raise TimeoutError(
                f"after {limit_seconds:g} s these {who} still run: {', '.join(map(str, running))}"
            )
        in_order = sorted(self._programs, key=lambda program: program.ended)
        self._programs = []
        return in_order

    def _stop_running(self, reason: str) -> None:
        """Kill what still runs; its log gets the reason."""
        for program in self._running():
            program.stopped = reason
            program.send_signal(signal.SIGKILL)
        wait_for_ranks(self._statuses, limit_seconds=_CLOSE_SECONDS)

    def _statuses(self) -> list[int | None]:
        """Return how the programs have ended; GroupError if the cluster has."""
        if self._process.poll() is not None:
            raise GroupError(f"the cluster has ended: {self._why_ended()}")
        return [program.status for program in self._programs]

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise UserError(f"node {node}: the cluster has nodes 0 to {self.nodes - 1}")
