"""``HostConnections``: a connection to the remote agent on each host; all connections close when the ``with`` ends.

Order: ``HostConnections(...)`` as a context manager, ``ask`` the hosts, ``start`` a command on each, ``wait``; perhaps ``signal``
or ``kill`` meanwhile. One thread reads from all hosts and one sends heartbeats, without which the hosts end by themselves; so
neither a slow terminal nor a busy caller loses a host."""

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.ssh.connection import LOST, HostConnection
from lab.ssh.hosts import Host, SSHOptions, program

_READ_BYTES = 1 << 16
_AT_ONCE = 64
_TURN_SECONDS = 20.0
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 15.0
_ERRORS_SECONDS = 2.0


class HostConnections:
    """The hosts of a launch.

    Parameters
    ----------
    on_line : called with a node's number and a line that its command wrote.
    on_piece : called with each piece of an archive, see remote_handlers.pack.

    ``by_rank`` holds the connections in the order of the hosts, ``ended`` the nodes in the order in which their commands ended.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        options: SSHOptions,
        *,
        on_line: Callable[[int, str], object] = lambda node, line: None,
        on_piece: Callable[[str], object] = lambda piece: None,
    ) -> None:
        self.hosts, self.on_line, self.on_piece = hosts, on_line, on_piece
        self.silence_seconds = options.silence_seconds
        """After which a connection without a sign of life counts as broken."""
        self.by_rank: list[HostConnection] = []
        self.ended: list[int] = []
        self._options = options
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._selector = selectors.DefaultSelector()
        # Not yet registered: the selector belongs to the reading thread alone.
        self._new: deque[HostConnection] = deque()
        self._hung_up: list[HostConnection] = []
        self._token, self._requests, self._turned = secrets.token_hex(16), 0, time.monotonic()
        self._threads = [
            threading.Thread(target=loop, daemon=True) for loop in (self._read, self._beat)
        ]

    def __enter__(self) -> "HostConnections":
        spec = {"token": self._token, "silence_seconds": self.silence_seconds}
        first = program() + json.dumps(spec).encode() + b"\n"
        for thread in self._threads:
            thread.start()
        try:
            for host in self.hosts:
                self.wait(lambda: len(self._connecting()) < _AT_ONCE, limit_seconds=_TURN_SECONDS)
                self.by_rank.append(HostConnection.open(host, self._options, first))
                self._new.append(self.by_rank[-1])
        except BaseException:
            self.close()
            raise
        return self

    def _connecting(self) -> list[HostConnection]:
        return [one for one in self.by_rank if not one.ready and not one.closed]

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on every host, and the connections; return when those are gone."""
        self._closing.set()
        for connection in self.by_rank:
            with contextlib.suppress(OSError):
                connection.stdin.close()  # the remote agent ends everything when its input closes
        deadline = time.monotonic() + _LEAVE_SECONDS
        for connection in self.by_rank:
            left_seconds = max(0.0, deadline - time.monotonic()) if connection.ready else 0
            with contextlib.suppress(subprocess.TimeoutExpired):
                connection.ssh.wait(left_seconds)
            connection.kill()
            connection.ssh.wait()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        self._selector.close()
        for connection in self.by_rank:
            connection.stdout.close()
            connection.stderr.close()

    def wait_until_ready(self, limit_seconds: float) -> None:
        """Wait until each remote agent has answered or its connection has failed: ``HostConnection.ready`` says which."""
        self.wait(lambda: not self._connecting(), limit_seconds=limit_seconds)

    def ask(
        self, what: str, *, nodes: Sequence[int], limit_seconds: float, **more: Any
    ) -> dict[int, Mapping[str, Any]]:
        """Ask several hosts the same at once; return by node {"result": …} or {"error": why}, also where no answer came."""
        self._requests += 1
        number, asked = self._requests, [self.by_rank[node] for node in nodes]
        for connection in asked:
            connection.send(do=what, id=number, **more)
        self.wait(
            lambda: all(number in one.answers or one.closed for one in asked),
            limit_seconds=limit_seconds,
        )
        answers = {}
        for connection in asked:
            why = (
                "the connection broke"
                if connection.closed
                else f"no answer within {limit_seconds:g} s"
            )
            answers[connection.host.rank] = connection.answers.pop(number, {"error": why})
        return answers

    def start(
        self, node: int, command: Sequence[str], *, environment: Mapping[str, str], folder: str
    ) -> None:
        """Start a command on a host and return at once; ``environment`` counts where the host has no value of its own."""
        connection = self.by_rank[node]
        with self._changed:
            connection.running, connection.status = not connection.closed, None
            connection.lines.clear()
        if connection.closed:
            self._note_end(connection, LOST)
        connection.send(
            do="start", command=list(command), environment=dict(environment), folder=folder
        )

    def signal(self, number: int) -> None:
        """Send a signal to the commands that still run, as a terminal does."""
        for node in self.running:
            self.by_rank[node].send(do="signal", signal=number)

    def kill(self) -> None:
        """Kill all processes of the commands that still run."""
        for node in self.running:
            self.by_rank[node].send(do="kill")

    @property
    def running(self) -> list[int]:
        """The nodes whose command still runs."""
        return [connection.host.rank for connection in self.by_rank if connection.running]

    def wait(self, condition: Callable[[], bool], *, limit_seconds: float | None = None) -> bool:
        """Wait until ``condition`` holds, checked whenever something has changed; return whether it does."""
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        with self._changed:
            while not condition():
                if deadline is not None and time.monotonic() > deadline:
                    return False
                self._changed.wait(_POLL_SECONDS)
        return True

    def _beat(self) -> None:
        """In a thread of its own: send heartbeats, and kill connections that have been silent for too long."""
        between = self.silence_seconds / 6
        while not self._closing.wait(between):
            now = time.monotonic()
            # While the reading thread itself is blocked, by a stopped terminal, silence says nothing about the hosts.
            reading = now - self._turned < max(between, 1.0)
            for connection in self.by_rank:
                if not connection.ready or connection.closed:
                    continue
                silent_seconds = now - connection.heard
                if reading and silent_seconds > self.silence_seconds:
                    connection.add_error(f"no sign of life for {silent_seconds:.0f} s\n".encode())
                    connection.kill()
                connection.send(do="beat")

    def _read(self) -> None:
        """In a thread of its own: read from all hosts, until all connections are closed."""
        while self._selector.get_map() or self._new or not self._closing.is_set():
            self._turned = time.monotonic()
            while self._new:
                connection = self._new.popleft()
                for stream in (connection.stdout, connection.stderr):
                    self._selector.register(stream, selectors.EVENT_READ, connection)
            for key, _ in self._selector.select(_POLL_SECONDS):
                connection, text = key.data, os.read(key.fd, _READ_BYTES)
                if text and key.fileobj is connection.stdout:
                    self._receive(connection, text)
                elif text:
                    connection.add_error(text)
                else:
                    self._selector.unregister(key.fileobj)
                    connection.hung_up = time.monotonic()
                    self._hung_up.append(connection)
            self._find_closed()

    def _find_closed(self) -> None:
        """A connection is closed when both streams have ended; a shared master of ssh may keep stderr open for ever."""
        for connection in list(self._hung_up):
            streams = (connection.stdout, connection.stderr)
            still_open = [one for one in streams if one in self._selector.get_map()]
            waited = time.monotonic() > connection.hung_up + _ERRORS_SECONDS
            if connection.closed:
                self._hung_up.remove(connection)
            elif not still_open or (still_open == [connection.stderr] and waited):
                for stream in still_open:
                    self._selector.unregister(stream)
                self._note_closed(connection)

    def _receive(self, connection: HostConnection, text: bytes) -> None:
        *lines, connection.rest = (connection.rest + text).split(b"\n")
        connection.heard = time.monotonic()
        for line in lines:
            if connection.ready:
                message = None
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                if isinstance(message, dict):  # else what a login shell prints at its end
                    self._handle(connection, message)
            elif line.endswith(self._token.encode()):
                with self._changed:
                    connection.ready = True
                    self._changed.notify_all()
            else:
                connection.add_error(line + b"\n")

    def _handle(self, connection: HostConnection, message: Mapping[str, Any]) -> None:
        if "line" in message:
            connection.lines.append(message["line"])
            self.on_line(connection.host.rank, message["line"])
        elif "piece" in message:
            self.on_piece(message["piece"])
        elif "ended" in message:
            self._note_end(connection, message["ended"])
        elif "killed" in message:
            connection.add_error(
                f"lab's own process there was killed by signal {message['killed']}\n".encode()
            )
        elif "answer" in message:
            with self._changed:
                connection.answers[message["answer"]] = message
                self._changed.notify_all()

    def _note_closed(self, connection: HostConnection) -> None:
        with self._changed:
            connection.closed = True
            self._changed.notify_all()
        if connection.running:
            self._note_end(connection, LOST)

    def _note_end(self, connection: HostConnection, status: int) -> None:
        with self._changed:
            connection.running, connection.status = False, status
            self.ended.append(connection.host.rank)
            self._changed.notify_all()
