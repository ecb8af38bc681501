"""The supervisor of an emulated cluster: it makes the network, and starts programs on the nodes.

``lab`` starts it as the first process of new namespaces (see channel.py). It answers requests on
its stdin, a socket, and reports what the programs do on its stdout. It ends when ``lab`` closes the
socket or ends; then the kernel ends every other process in the namespaces.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import psutil

from common.errors import UserError
from common.utils.processes import (
    adopt_orphans,
    descendants,
    kill_on_parent_exit,
)
from common.utils.system import batch_scheduling, usable_cores
from lab.cluster import network
from lab.cluster.network import Link
from lab.cluster.program import NOT_FOUND, parse_python, preload_modules, reset_forked_state
from lab.processes.descendants import kill_descendants

_READ_BYTES = 65536
_ERRORS = (ValueError, RuntimeError, OSError, subprocess.TimeoutExpired)


@dataclass
class _Program:
    """What runs on a node.

    output : the pipe that the program writes to, here for reading; closed at its end.
    partial_line : what the program has written since its last newline.
    """

    pid: int
    output: FileIO
    partial_line: bytes = b""


class NodeSupervisor:
    """The nodes of one cluster.

    A request is (number, name of a method, arguments), its answer (number, result or error).
    An event is (node, line that its program wrote) or (node, exit status of its program).
    """

    traffic = staticmethod(network.traffic)

    def __init__(self) -> None:
        self._requests = Connection(os.dup(0))
        self._events = Connection(os.dup(1), readable=False)
        os.dup2(2, 1)  # what this process prints must not mix with the events
        self._link: Link | None = None
        self._nodes = 0
        self._programs: dict[int, _Program] = {}
        self._child_ended, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def build(self, nodes: int, link: Link | None, preload: bool) -> list[str]:
        """Make the network and import torch; return the ids of the nodes' network namespaces.

        link : of each node; None on loopback, where nodes are processes without their own network.
        """
        self._nodes, self._link = nodes, link
        if link is None:
            adopt_orphans()
        else:
            network.build(nodes, link)
        if preload:
            preload_modules()
        return [] if link is None else [network.namespace_id(node) for node in range(nodes)]

    def serve(self) -> None:
        """Answer requests and report events until the socket of the requests is closed."""
        while True:
            outputs = {
                program.output.fileno(): node
                for node, program in self._programs.items()
                if not program.output.closed
            }
            ready = wait([self._requests, self._child_ended, *outputs])
            for output, node in outputs.items():
                if output in ready:
                    self._forward_output(node)
            if self._child_ended in ready:
                os.read(self._child_ended, _READ_BYTES)
                self._reap()
            if self._requests in ready:
                try:
                    number, name, arguments = self._requests.recv()
                except (EOFError, OSError):
                    return
                try:
                    answer = getattr(self, name)(*arguments)
                except _ERRORS as error:
                    answer = UserError(str(error))
                self._requests.send((number, answer))

    def end(self) -> None:
        """Kill what runs on the nodes. In namespaces the kernel does that."""
        if self._link is None:
            kill_descendants()

    def send_signal(self, number: int) -> None:
        """Send a signal to each program's process group, as a terminal does for Ctrl-C."""
        for program in self._programs.values():
            _send_signal(-program.pid, number)

    def fault(self, node: int, fault: str, rate_bits: float | None) -> None:
        """Disturb a node, see ``Cluster.fault``."""
        link = self._link
        match fault:
            case "cut" if link is not None:
                network.set_link(node, "down")
            case "slow" if link is not None:
                network.shape(node, Link(rate_bits, link.latency_seconds))
            case "cut" | "slow":
                raise RuntimeError(
                    f"a node on loopback has no link of its own to {fault}: start the cluster "
                    "without --loopback"
                )
            case "pause":
                self._signal_all(node, signal.SIGSTOP)
            case "kill":
                self._signal_all(node, signal.SIGKILL)
            case "restore":
                if link is not None:
                    network.set_link(node, "up")
                    network.shape(node, link)
                self._signal_all(node, signal.SIGCONT)

    def _signal_all(self, node: int, number: int) -> None:
        """Signal every process of a node, until no new ones appear."""
        program = self._programs.get(node)
        known: set[int] = set()
        while new := set(self._pids(node)) - known:
            known |= new
            # The node's program first: otherwise it might see a child killed, and end by itself.
            for pid in sorted(new, key=lambda pid: program is None or pid != program.pid):
                _send_signal(pid, number)

    def _pids(self, node: int) -> list[int]:
        if self._link is not None:
            return network.pids_in(network.namespace_id(node), psutil.pids())
        program = self._programs.get(node)
        return [] if program is None else [program.pid, *descendants(program.pid)]

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        """Start a command on a node on which nothing runs."""
        reader, writer = os.pipe()
        with batch_scheduling(self._nodes > usable_cores()):
            pid = os.fork()
            if pid == 0:
                self._become(node, writer, command, environment, folder)
        os.close(writer)
        self._programs[node] = _Program(pid, FileIO(reader))

    def _become(
        self,
        node: int,
        output: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
    ) -> NoReturn:
        """Turn this fork into the node's program."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if self._link is not None:
                network.enter_namespace(network.namespace_file(node))
            elif die_with_parent := kill_on_parent_exit():
                die_with_parent()
            os.closerange(3, max(map(int, os.listdir("/dev/fd"))) + 1)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            program = parse_python(command) if "torch" in sys.modules else None
            if program is None:
                os.execvpe(command[0], list(command), environment)
            reset_forked_state(environment, Path(folder if program.module else program.target))
            program.run()
        except Exception as error:
            what = folder if getattr(error, "filename", None) == folder else command[0]
            os.write(2, f"error: {what}: {getattr(error, 'strerror', error)}\n".encode())
        finally:  # a fork must never return to ``serve``
            os._exit(NOT_FOUND)

    def _forward_output(self, node: int) -> None:
        """Send the whole lines that a node's program has written."""
        program = self._programs[node]
        while not program.output.closed and wait([program.output.fileno()], timeout=0):
            text = program.output.read(_READ_BYTES)
            *lines, program.partial_line = (program.partial_line + text).split(b"\n")
            for line in lines:
                self._send(node, line.decode(errors="replace"))
            if not text:
                program.output.close()

    def _reap(self) -> None:
        """Reap every ended process, and report those that were a node's program.

        The others are orphans that this process has adopted.
        """
        nodes = {program.pid: node for node, program in self._programs.items()}
        with contextlib.suppress(ChildProcessError):  # there is no child left
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if pid in nodes:
                    self._report_end(nodes[pid], os.waitstatus_to_exitcode(status))

    def _report_end(self, node: int, status: int) -> None:
        self._forward_output(node)
        program = self._programs.pop(node)
        program.output.close()  # a process that the program left behind may still hold the pipe
        if program.partial_line:
            self._send(node, program.partial_line.decode(errors="replace"))
        self._send(node, status)

    def _send(self, node: int, event: str | int) -> None:
        with contextlib.suppress(BrokenPipeError):  # lab has ended; ``serve`` will end, too
            self._events.send((node, event))


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def main() -> None:
    """Serve until the parent process closes the socket or ends."""
    supervisor = NodeSupervisor()
    try:
        supervisor.serve()
    finally:
        supervisor.end()
