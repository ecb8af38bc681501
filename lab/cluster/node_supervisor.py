"""The supervisor of an emulated cluster: the first process of its namespaces. The kernel ends all others with it.

``main`` builds the network, imports torch once, then serves requests, a line of JSON each: start, fault, signal, traffic. It ends
when its input does: with the process that started it, however that ended. In a forked node ``serve`` returns the program that
the node runs.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.utils.processes import adopt_orphans, descendants, kill_on_parent_exit
from lab.cluster import network
from lab.cluster.network import Link
from lab.cluster.program import PythonProgram, parse_python, preload_modules, reset_forked_state

_NETWORK_NAMESPACE = 0x40000000
_READ_BYTES = 65536
_NOT_FOUND = 127


class NodeSupervisor:
    """The nodes of one cluster, their processes and links.

    Parameters
    ----------
    nodes : their number.
    link : of each of them; None: no network of its own, all nodes are processes on loopback.
    """

    def __init__(self, nodes: int, link: Link | None) -> None:
        self._nodes, self._link = nodes, link
        self._programs: dict[int, _Program] = {}
        self._selector = selectors.DefaultSelector()
        self._channel = os.dup(1)
        os.dup2(2, 1)  # output printed in this process must not mix with the answers
        self._requests = b""

    def serve(self, *, preload: bool) -> PythonProgram | None:
        """Build the network, report that it is ready, and serve until the input ends; in a forked node, return its program."""
        try:
            if self._link is not None:
                network.build(self._nodes, self._link)
            else:
                adopt_orphans()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            self._send({"failed": str(error)})
            return None
        if preload:
            preload_modules()
        self._watch_children()
        self._selector.register(0, selectors.EVENT_READ, self._take_requests)
        nodes = range(self._nodes)
        networks = ["" if self._link is None else _name_of_network(node) for node in nodes]
        self._send({"ready": networks})
        while True:
            for key, _ in self._selector.select():
                done, program = key.data(key.fd)
                if done or program is not None:
                    return program
            self._reap()

    def end(self) -> None:
        """End every process of every node; with namespaces of its own, the kernel does."""
        if self._link is None:
            while left := descendants(os.getpid()):
                for pid in left:
                    _signal(pid, signal.SIGKILL)
                self._reap()

    def _watch_children(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def wake(fd: int) -> tuple[bool, None]:
            os.read(fd, _READ_BYTES)
            return False, None

        self._selector.register(reader, selectors.EVENT_READ, wake)

    def _take_requests(self, fd: int) -> tuple[bool, PythonProgram | None]:
        text = os.read(fd, _READ_BYTES)
        if not text:
            return True, None
        *requests, self._requests = (self._requests + text).split(b"\n")
        for line in requests:
            request = json.loads(line)
            try:
                if request["do"] == "start":
                    program = self._start(
                        request["node"],
                        request["command"],
                        request["environment"],
                        request["folder"],
                    )
                    if program is not None:
                        return False, program
                    result = None
                else:
                    result = self._do(request)
                self._send({"reply": request["id"], "result": result})
            except (ValueError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                self._send({"reply": request["id"], "error": str(error)})
        return False, None

    def _do(self, request: Mapping[str, Any]) -> Any:
        if request["do"] == "traffic":
            return network.traffic(self._nodes)
        if request["do"] == "signal":
            for program in self._programs.values():
                _signal(-program.pid, request["signal"])  # to its group, as a terminal does
        else:
            self._fault(request["node"], request["fault"], request["rate_bits"])
        return None

    def _fault(self, node: int, fault: str, rate_bits: float | None) -> None:
        if fault in ("cut", "slow") and self._link is None:
            raise ValueError(
                f"a node on loopback has no link of its own to {fault}: start the cluster without --loopback"
            )
        match fault:
            case "cut":
                network.cut(node)
            case "slow":
                assert self._link is not None  # checked above
                network.shape(node, Link(rate_bits, self._link.latency_seconds))
            case "pause":
                self._signal_all(node, signal.SIGSTOP)
            case "kill":
                self._signal_all(node, signal.SIGKILL)
            case "restore":
                if self._link is not None:
                    network.join(node)
                    network.shape(node, self._link)
                self._signal_all(node, signal.SIGCONT)

    def _signal_all(self, node: int, number: int) -> None:
        """Also to what the node's program has started, and until nothing new is found."""
        known: set[int] = set()
        program = self._programs.get(node)
        while new := set(self._processes(node)) - known:
            known |= new
            # The node's own program first: killed after its children, it might see them end and end by itself.
            for pid in sorted(new, key=lambda pid: program is None or pid != program.pid):
                _signal(pid, number)

    def _processes(self, node: int) -> list[int]:
        if self._link is None:
            program = self._programs.get(node)
            return [program.pid, *descendants(program.pid)] if program is not None else []
        name, found = _name_of_network(node), []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                try:
                    if os.readlink(f"/proc/{entry}/ns/net") == name:
                        found.append(int(entry))
                except OSError:  # it has just ended
                    continue
        return found

    def _start(
        self, node: int, command: list[str], environment: dict[str, str], folder: str
    ) -> PythonProgram | None:
        """Start a command on a node; return None in this process, and in a forked node its program."""
        if node in self._programs:
            raise ValueError(f"node {node} still runs {self._programs[node].name}")
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            os.set_blocking(reader, False)
            self._programs[node] = _Program(pid, reader, command[0])
            self._selector.register(
                reader, selectors.EVENT_READ, lambda _: (self._take_output(node), None)
            )
            return None
        return self._become(node, writer, command, environment, folder)

    def _become(
        self, node: int, writer: int, command: list[str], environment: dict[str, str], folder: str
    ) -> PythonProgram:
        """In the child: close everything that is the supervisor's, enter the node, and return its program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if self._link is None:
            (kill_on_parent_exit() or (lambda: None))()
        else:
            _enter_network(node)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        self._selector.close()
        open_files = "/proc/self/fd"
        end = max(map(int, os.listdir(open_files))) + 1 if os.path.isdir(open_files) else 256
        os.closerange(3, end)
        os.environ.clear()
        os.environ.update(environment)
        what = folder
        try:
            os.chdir(folder)
            program, what = parse_python(command) if "torch" in sys.modules else None, command[0]
            if program is None:
                os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"error: {what}: {error.strerror}\n".encode())
            os._exit(_NOT_FOUND)
        reset_forked_state(environment, Path(folder if program.module else program.target))
        return program

    def _take_output(self, node: int) -> bool:
        """Send the whole lines that a node wrote; return False, so that ``serve`` continues."""
        program = self._programs[node]
        try:
            while text := os.read(program.reader, _READ_BYTES):
                *lines, program.rest = (program.rest + text).split(b"\n")
                for line in lines:
                    self._send({"node": node, "line": line.decode(errors="replace")})
            self._selector.unregister(program.reader)  # closed at the other end
            program.closed = True
        except BlockingIOError:
            pass
        return False

    def _reap(self) -> None:
        """Collect the exit status of ended processes: nodes, and orphans, which the first process of a namespace inherits."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            node = next(
                (node for node, program in self._programs.items() if program.pid == pid), None
            )
            if node is None:
                continue
            program = self._programs[node]
            if not program.closed:
                self._take_output(node)
            if not program.closed:
                self._selector.unregister(program.reader)
            os.close(program.reader)
            del self._programs[node]
            if program.rest:
                self._send({"node": node, "line": program.rest.decode(errors="replace")})
            self._send({"node": node, "ended": os.waitstatus_to_exitcode(status)})

    def _send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message).encode() + b"\n"
        while text:
            text = text[os.write(self._channel, text) :]


class _Program:
    """What runs on a node: the process, and the pipe that its output comes through."""

    def __init__(self, pid: int, reader: int, name: str) -> None:
        self.pid, self.reader, self.name = pid, reader, name
        self.rest, self.closed = b"", False


def _name_of_network(node: int) -> str:
    """Return a node's network namespace as /proc names it, inside and outside."""
    return f"net:[{network.namespace_file(node).stat().st_ino}]"


def _enter_network(node: int) -> None:
    with network.namespace_file(node).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def main() -> None:
    """Supervise the cluster that the last argument describes."""
    spec = json.loads(sys.argv[-1])
    link = None if spec["loopback"] else Link(spec["rate_bits"], spec["latency_seconds"])
    supervisor = NodeSupervisor(spec["nodes"], link)
    program = supervisor.serve(preload=spec["preload"])
    if program is not None:
        program.run()
    else:
        supervisor.end()


SUPERVISOR_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from lab.cluster.node_supervisor import main; main()"
"""Of ``python -P -c``, with the repository's folder and the spec as arguments, so that no installation is needed."""
