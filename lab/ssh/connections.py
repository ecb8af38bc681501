"""``HostConnections``: connections to the remote agents of all hosts, until the ``with`` ends.

Order: ``HostConnections(...)`` as a context manager, ``ask`` the hosts, ``start`` a command on
each, ``wait``; optionally ``signal`` or ``kill`` meanwhile. One thread per host reads, and one
thread sends heartbeats to all hosts; a host that receives none ends its command. Since threads do
this, a slow terminal or a busy caller loses no host.
"""

import contextlib
import math
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from common.utils.typed_json import calm
from lab.ssh.connection import LOST, HostConnection
from lab.ssh.hosts import Host, SSHOptions, program

_AT_ONCE = 64
_TURN_SECONDS = 20.0
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 15.0
_ERRORS_SECONDS = 2.0
_READ_BYTES = 1 << 13
_MOST_BYTES = 1 << 26  # of one message; a piece of a file has 6 MB


class _Message(msgspec.Struct):
    """A message of the remote agent: an answer, a line of the command, or its end."""

    answer: str | None = None
    result: Any = None
    error: str | None = None
    line: str | None = None
    ended: int | None = None


class HostConnections:
    """The hosts of a launch.

    ``on_line`` is called with a node's number and a line that its command wrote. ``by_rank`` holds
    the connections in the order of the hosts. ``running`` holds the nodes whose command runs,
    ``ended`` the status of each whose command has ended, in the order of the ends. A connection
    counts as broken if nothing arrives on it for ``silence_seconds``.
    """

    def __init__(self, hosts: Sequence[Host], options: SSHOptions) -> None:
        self.hosts, self.silence_seconds = hosts, options.silence_seconds
        self.on_line: Callable[[int, str], object] = lambda node, line: None
        self.by_rank: list[HostConnection] = []
        self.running: set[int] = set()
        self.ended: dict[int, int] = {}
        self._options = options
        self._changed, self._closing = threading.Event(), threading.Event()
        self._token = secrets.token_hex(16)

    def __enter__(self) -> "HostConnections":
        text = program(self._token, self.silence_seconds)
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            for host in self.hosts:
                self.wait(
                    lambda: sum(one.connecting for one in self.by_rank) < _AT_ONCE,
                    limit_seconds=_TURN_SECONDS,
                )
                self.by_rank.append(HostConnection.open(host, self._options, text))
                threading.Thread(target=self._read, args=self.by_rank[-1:], daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """End the commands on all hosts, then the connections; return when these are closed."""
        self._closing.set()
        for connection in self.by_rank:
            connection.end_input()
        self.wait(
            lambda: all(one.closed or not one.ready for one in self.by_rank),
            limit_seconds=_LEAVE_SECONDS,
        )
        for connection in self.by_rank:
            connection.kill()
        self.wait(lambda: all(one.closed for one in self.by_rank), limit_seconds=_LEAVE_SECONDS)
        for connection in self.by_rank:
            connection.errors.close()

    def ask(
        self, what: str, *, nodes: Sequence[int], limit_seconds: float, **values: Any
    ) -> dict[int, Mapping[str, Any]]:
        """Ask several hosts the same at once.

        Returns by node {"result": …} or {"error": why}, an error also if no answer came.
        """
        asked = [self.by_rank[node] for node in nodes]
        for connection in asked:
            connection.answers.pop(what, None)
            connection.send(do=what, **values)
        self.wait(
            lambda: all(what in one.answers or one.closed for one in asked),
            limit_seconds=limit_seconds,
        )
        late = f"no answer within {limit_seconds:g} s"
        return {
            one.host.rank: one.answers.get(
                what, {"error": "the connection broke" if one.closed else late}
            )
            for one in asked
        }

    def start(
        self, node: int, command: Sequence[str], *, environment: Mapping[str, str], folder: str
    ) -> None:
        """Start a command on a host and return at once.

        environment : variables for the command; the host's own values win.
        """
        connection = self.by_rank[node]
        connection.lines.clear()
        self.ended.pop(node, None)
        self.running.add(node)
        connection.send(
            do="start", command=list(command), environment=dict(environment), folder=folder
        )
        if connection.closed:
            self._note_end(node, LOST)

    def signal(self, number: int) -> None:
        """Send a signal to the commands that still run, as a terminal does."""
        for node in self.running.copy():
            self.by_rank[node].send(do="signal", number=number)

    def kill(self) -> None:
        """Kill all processes of the commands that still run, and end their hosts' agents."""
        for node in self.running.copy():
            self.by_rank[node].end_input()

    def wait(self, condition: Callable[[], bool], *, limit_seconds: float = math.inf) -> bool:
        """Wait until ``condition``, checked after every message, holds; return whether it does."""
        deadline = time.monotonic() + limit_seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._changed.wait(_POLL_SECONDS)
            self._changed.clear()
        return True

    def _beat(self) -> None:
        """In its own thread: send heartbeats, and kill connections that are silent for too long."""
        while not self._closing.wait(self.silence_seconds / 6):
            for connection in [one for one in self.by_rank if one.ready and not one.closed]:
                silent_seconds = time.monotonic() - connection.heard
                if silent_seconds > self.silence_seconds:
                    connection.errors.write(f"no message for {silent_seconds:.0f} s\n".encode())
                    connection.kill()
                connection.send(do="beat")

    def _read(self, connection: HostConnection) -> None:
        """In a thread for each host: handle what arrives, until the connection is closed."""
        try:
            self._read_messages(connection)
        finally:  # else the launch would wait for this host for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                connection.ssh.wait(_ERRORS_SECONDS)  # until then it may write errors
            connection.closed = True
            if connection.host.rank in self.running:
                self._note_end(connection.host.rank, LOST)
            self._changed.set()

    def _read_messages(self, connection: HostConnection) -> None:
        line = bytearray()
        with connection.stdout:
            # In pieces: each shows that the host is alive while a long message arrives slowly.
            for piece in iter(partial(connection.stdout.readline, _READ_BYTES), b""):
                # While a stopped terminal blocks this thread, silence says nothing about the host.
                connection.heard = math.inf
                line += piece
                if len(line) > _MOST_BYTES:
                    connection.errors.write(b"it sent a message of more than 64 MB\n")
                    connection.kill()
                    return
                if piece.endswith(b"\n"):
                    self._handle(connection, bytes(line))
                    line.clear()
                connection.heard = time.monotonic()
        self._handle(connection, bytes(line))  # the last line may have no newline

    def _handle(self, connection: HostConnection, line: bytes) -> None:
        """Handle a message of the remote agent, or a line of the login shell."""
        _, token, text = line.partition(self._token.encode())
        message = _Message()
        if token and line.endswith(b"\n"):
            # DecodeError: another program of the shell wrote into the line.
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                message = msgspec.json.decode(text, type=_Message)
        if message.line is not None:
            connection.lines.append(message.line)
            self.on_line(connection.host.rank, message.line)
        elif message.ended is not None:
            self._note_end(connection.host.rank, message.ended)
        elif message.answer is not None:
            connection.ready = True  # its first message is an answer
            connection.answers[message.answer] = (
                {"result": message.result}
                if message.error is None
                else {"error": calm(message.error)}
            )
        elif not connection.ready:
            connection.errors.write(line)
        self._changed.set()

    def _note_end(self, node: int, status: int) -> None:
        self.ended[node] = status
        self.running.discard(node)  # last: then the main thread reads the status
