"""The program that runs on a host during ``lab launch``: it starts the command and ends all of it when the connection ends.

Its text is sent over ssh, so it is always of the terminal's version. It runs on Python 3.6 and later (also its annotations, hence
the quotes), so that a host with an old Python can report it. Requests arrive as lines of JSON on stdin, a heartbeat among them
every few seconds; when stdin closes or falls silent, every process that it has started, in whatever session, is killed. Where the
agent itself is killed, its parent does that.

``lab.ssh.hosts.program`` joins this text to remote_handlers.py, and calls ``main`` with HANDLERS: the names of both share one
namespace.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Handlers = Mapping[str, Callable[..., Any]]

_ADOPT_ORPHANS, _DIE_WITH_PARENT = 36, 1  # of prctl
_KILL_SECONDS = 10.0
_DRAIN_SECONDS = 5.0
_LONGEST_LINE = 1 << 16
_NOT_FOUND = 127
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class RemoteAgent:
    """Serves requests. ``handlers`` : functions by the request's name; what they return is sent back."""

    def __init__(self, token: str, handlers: "Handlers", silence_seconds: float) -> None:
        self._handlers, self._silence_seconds = handlers, silence_seconds
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        self._program: subprocess.Popen[bytes] | None = None
        self._sending = threading.Lock()
        self._send_text(token + "\n")  # what came before it was the login shell's

    def serve(self) -> None:
        """Handle requests until the connection ends."""
        _prctl(_ADOPT_ORPHANS, 1)
        _prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda *_: self._leave())
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            request = self._requests.get()
            try:
                self._do(request)
            except Exception as error:  # whatever it is, the terminal must not wait for ever
                why = f"{type(error).__name__}: {error}"
                self.send({"answer": request.get("id"), "error": why})

    def _do(self, request: "dict[str, Any]") -> None:
        what = request["do"]
        if what == "start":
            self._start(request["command"], request["environment"], request["folder"])
        elif what == "signal":
            if self._program is not None and self._program.poll() is None:
                os.killpg(self._program.pid, request["signal"])  # to its group, as a terminal does
        elif what == "kill":
            end_all(self._program)
        else:
            threading.Thread(target=self._answer, args=[request], daemon=True).start()

    def _answer(self, request: "dict[str, Any]") -> None:
        try:
            result = self._handlers[request["do"]](request, self.send)
            self.send({"answer": request["id"], "result": result})
        except Exception as error:
            self.send({"answer": request["id"], "error": str(error) or type(error).__name__})

    def send(self, message: "dict[str, Any]") -> None:
        self._send_text(json.dumps(message) + "\n")

    def _send_text(self, text: str) -> None:
        content = text.encode("utf-8", "replace")
        with self._sending:
            while content:
                try:
                    content = content[os.write(1, content) :]
                except OSError:  # the connection has ended: the input will close, too
                    return

    def _listen(self) -> None:
        """In a thread of its own, since writing waits for a reader, and the network may be cut: read requests, notice silence."""
        rest = b""
        while True:
            ready, _, _ = select.select([0], [], [], self._silence_seconds)
            text = os.read(0, 1 << 16) if ready else b""
            if not text:
                self._leave()
            lines = (rest + text).split(b"\n")
            rest = lines.pop()
            for line in lines:
                request = json.loads(line.decode())
                if request["do"] == "beat":
                    threading.Thread(target=self.send, args=[{"beat": 1}], daemon=True).start()
                else:
                    self._requests.put(request)

    def _leave(self) -> None:
        end_all(self._program)
        os._exit(0)

    def _start(
        self, command: "Sequence[str]", environment: "Mapping[str, str]", folder: str
    ) -> None:
        here = os.path.dirname(sys.executable)
        environment = dict(environment, **os.environ)
        environment["PATH"] = here + os.pathsep + environment.get("PATH", os.defpath)
        try:
            self._program = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _prctl(_DIE_WITH_PARENT, signal.SIGKILL),
            )
        except OSError as error:
            self.send({"line": f"error: {command[0]}: {error.strerror}"})
            self.send({"ended": _NOT_FOUND, "left": 0})
            return
        relay = threading.Thread(target=self._relay, args=[self._program.stdout], daemon=True)
        relay.start()
        threading.Thread(target=self._watch, args=[self._program, relay], daemon=True).start()

    def _relay(self, output: "IO[bytes]") -> None:
        while True:
            line = output.readline(_LONGEST_LINE)
            if not line:
                return
            self.send({"line": line.decode("utf-8", "replace").rstrip("\n")})

    def _watch(self, program: "subprocess.Popen[bytes]", relay: threading.Thread) -> None:
        """Wait for its end; kill what it has left behind, then report the end."""
        status = program.wait()
        left = end_all(program)
        relay.join(_DRAIN_SECONDS)
        self.send({"ended": status, "left": left})


def end_all(program: "subprocess.Popen[bytes] | None") -> int:
    """Kill all processes that descend from this one; return how many are still alive.

    program : the command, whose exit status another thread waits for.
    """
    deadline = time.time() + _KILL_SECONDS
    while True:
        left = [
            pid for pid in _descendants(os.getpid(), program) if not _signal(pid, signal.SIGKILL)
        ]
        if not left or time.time() > deadline:
            return len(left)
        time.sleep(0.02)


def _descendants(root: int, program: "subprocess.Popen[bytes] | None") -> "list[int]":
    """Living processes that descend from ``root``; reaps dead children except ``program``, which has a thread of its own."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for pid, parent, state in _processes():
        children.setdefault(parent, []).append(pid)
        states[pid] = state
    found: list[int] = []
    generation = [root]
    while generation:
        generation = [pid for parent in generation for pid in children.get(parent, [])]
        found += [pid for pid in generation if states[pid] not in "ZX"]
    for pid in children.get(root, []):
        if states[pid] == "Z" and (program is None or pid != program.pid):
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
    return found


def _processes() -> "list[tuple[int, int, str]]":
    """Process, parent and state of all that run."""
    if not os.path.isdir("/proc/self"):
        listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,stat=,comm="])
        columns = [line.split(None, 3) for line in listing.decode("utf-8", "replace").splitlines()]
        return [
            (int(row[0]), int(row[1]), row[2][0])
            for row in columns
            if len(row) == 4 and os.path.basename(row[3]) != "ps"
        ]
    rows = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            rows.append((int(entry), int(fields[1]), fields[0].decode()))
    return rows


def _signal(pid: int, number: int) -> bool:
    """Return whether there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except OSError:  # of another user: nothing can be done
        pass
    return False


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere processes in sessions of their own may escape."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _guard(agent: int) -> None:
    """Wait for the agent, the child process ``agent``; end what it has left behind, and report if it was killed."""
    _prctl(_ADOPT_ORPHANS, 1)
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: os.kill(agent, signal.SIGTERM))
    ended = 0
    while ended != agent:
        ended, status = os.wait()
    end_all(None)
    if os.WIFSIGNALED(status):
        os.write(1, b'\n{"killed": %d}\n' % os.WTERMSIG(status))


def main(handlers: "Handlers") -> None:
    """Serve requests; the first line of stdin gives the token to begin with and the longest silence."""
    first = b""
    while not first.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            return
        first += piece
    spec = json.loads(first.decode())
    agent = os.fork()
    if agent:
        _guard(agent)
    else:
        RemoteAgent(spec["token"], handlers, spec["silence_seconds"]).serve()
