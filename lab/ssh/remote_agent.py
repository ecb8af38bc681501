"""The program that runs on a host during ``lab launch``: it starts the command, and ends it.

Requests arrive as lines of JSON on stdin, among them a heartbeat every few seconds. When stdin
closes or is silent for too long, the agent kills every process that it has started, in whatever
session. A guard, its parent process, does the same if the agent itself is killed.

``lab.ssh.hosts.program`` joins this text to remote_handlers.py and appends a call of ``main``; the
names of both files share one namespace. The text is sent over ssh, so its version is always the
terminal's. It runs on Python 3.6 (annotations too, hence the quotes), so that a host with an old
Python can report it.
"""

import contextlib
import json
import os
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
    """Serves requests.

    Parameters
    ----------
    token : prefix of each line sent, to distinguish it from what the login shell prints.
    handlers : a function for each request, by name; it takes the request's values, and its result
        is sent back.
    """

    def __init__(self, token: str, handlers: "Handlers", silence_seconds: float) -> None:
        self._token, self._silence_seconds = token, silence_seconds
        self._handlers = dict(handlers, signal=self._signal)
        self._program: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread()
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Handle requests until the connection ends.

        This thread must never block on writing: it has to notice when the network is cut. It also
        starts the command, because the kernel kills a program with the thread that started it.
        """
        _prctl(_ADOPT_ORPHANS, 1)
        _prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda *_: self._leave())
        self.send({"answer": "ready"})
        rest = b""
        while True:
            ready, _, _ = select.select([0], [], [], self._silence_seconds)
            text = os.read(0, 1 << 16) if ready else b""
            if not text:
                self._leave()
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                request = json.loads(line.decode())
                what = request.pop("do")
                if what == "start":
                    self._start(**request)
                else:
                    threading.Thread(target=self._answer, args=[what, request], daemon=True).start()

    def _answer(self, what: str, values: "Mapping[str, Any]") -> None:
        try:
            self.send({"answer": what, "result": self._handlers[what](**values)})
        except Exception as error:  # whatever it is, the terminal needs an answer
            self.send({"answer": what, "error": str(error) or type(error).__name__})

    def send(self, message: "Mapping[str, Any]") -> None:
        """Send a message as one line."""
        # A memoryview, so that slicing a long message copies nothing.
        content = memoryview((self._token + json.dumps(message) + "\n").encode())
        with self._sending, contextlib.suppress(OSError):  # the connection has ended
            while content:
                content = content[os.write(1, content) :]

    def _leave(self) -> None:
        end_all(self._program)
        if self._watcher.is_alive():
            self._watcher.join(_DRAIN_SECONDS)  # it reports the end
        os._exit(0)

    def _start(
        self, command: "Sequence[str]", environment: "Mapping[str, str]", folder: str
    ) -> None:
        environment = dict(environment, **os.environ)
        path = environment.get("PATH", os.defpath)
        environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + path
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
            self.send({"ended": _NOT_FOUND})
        else:
            self._watcher = threading.Thread(target=self._watch, args=[self._program], daemon=True)
            self._watcher.start()

    def _signal(self, number: int) -> None:
        """Send a signal to the command's process group, as a terminal does."""
        if self._program is not None and self._program.poll() is None:
            os.killpg(self._program.pid, number)

    def _watch(self, program: "subprocess.Popen[bytes]") -> None:
        """Send the command's output; when it has ended, kill what it left behind and report it."""
        relay = threading.Thread(target=self._relay, args=[program.stdout], daemon=True)
        relay.start()
        status = program.wait()
        end_all(program)
        relay.join(_DRAIN_SECONDS)
        self.send({"ended": status})

    def _relay(self, output: "IO[bytes]") -> None:
        for line in iter(lambda: output.readline(_LONGEST_LINE), b""):
            self.send({"line": line.decode("utf-8", "replace").rstrip("\n")})


def end_all(program: "subprocess.Popen[bytes] | None") -> None:
    """Kill and reap all processes that descend from this one.

    program : the command; not reaped here, since another thread waits for its exit status.
    """
    deadline = time.time() + _KILL_SECONDS
    while time.time() < deadline:
        found = _descendants()
        if not found:
            return
        for pid in found:
            # It may have ended, belong to another user, or be no child.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                if program is None or pid != program.pid:
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _descendants() -> "list[int]":
    """Return the processes that descend from this one, and dead ones that are not reaped yet."""
    parents = _parents()
    found: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found += generation
    return found


def _parents() -> "dict[int, int]":
    """Return the parent of every process that runs."""
    if not os.path.isdir("/proc/self"):
        listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,comm="])
        rows = [row.split(None, 2) for row in listing.decode("utf-8", "replace").splitlines()]
        return {int(row[0]): int(row[1]) for row in rows if os.path.basename(row[-1]) != "ps"}
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            found[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def _prctl(option: int, value: int) -> None:
    """Call prctl, on Linux only; elsewhere processes in sessions of their own may escape."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _guard(agent: int) -> None:
    """Wait for the agent, a child process; kill what it leaves, and report if it was killed."""
    _prctl(_ADOPT_ORPHANS, 1)
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: os.kill(agent, signal.SIGTERM))
    ended = 0
    while ended != agent:
        ended, status = os.wait()
    end_all(None)
    if os.WIFSIGNALED(status):
        message = f"lab's process on the host was killed by signal {os.WTERMSIG(status)}\n"
        os.write(2, message.encode())


def main(handlers: "Handlers", token: str, silence_seconds: float) -> None:
    """Start the agent as a child process and wait for it."""
    agent = os.fork()
    if agent:
        _guard(agent)
    else:
        RemoteAgent(token, handlers, silence_seconds).serve()
