"""``HostConnections``: connections to the remote agents of all hosts, until the ``with`` ends.

Order: ``HostConnections(...)`` as a context manager, ``ask`` the hosts, ``start`` a command on
each, ``wait``; perhaps ``signal`` or ``kill`` meanwhile. A thread for each host reads, and one
sends heartbeats to all: without them the hosts end by themselves. So neither a slow terminal nor a
busy caller loses a host.
"""

import contextlib
import json
import math
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.ssh.connection import LOST, HostConnection
from lab.ssh.hosts import Host, SSHOptions, program

_AT_ONCE = 64
_TURN_SECONDS = 20.0
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 15.0
_ERRORS_SECONDS = 2.0


class HostConnections:
    """The hosts of a launch.

    ``on_line`` is called with a node's number and a line that its command wrote. ``by_rank`` holds
    the connections in the order of the hosts, ``ended`` the nodes in the order in which their
    commands ended. A connection without a sign of life for ``silence_seconds`` counts as broken.
    """

    def __init__(self, hosts: Sequence[Host], options: SSHOptions) -> None:
        self.hosts, self.silence_seconds = hosts, options.silence_seconds
        self.on_line: Callable[[int, str], object] = lambda node, line: None
        self.by_rank: list[HostConnection] = []
        self.ended: list[int] = []
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
        """End what runs on every host, and the connections; return when those are gone."""
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

        Returns by node {"result": …} or {"error": why}, the latter also where no answer came.
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

        environment : counts where the host has no value of its own.
        """
        connection = self.by_rank[node]
        connection.lines.clear()
        connection.running, connection.status = True, None
        connection.send(
            do="start", command=list(command), environment=dict(environment), folder=folder
        )
        if connection.closed:
            self._note_end(connection, LOST)

    def signal(self, number: int) -> None:
        """Send a signal to the commands that still run, as a terminal does."""
        for node in self.running:
            self.by_rank[node].send(do="signal", number=number)

    def kill(self) -> None:
        """Kill all processes of the commands that still run, and end their hosts' agents."""
        for node in self.running:
            self.by_rank[node].end_input()

    @property
    def running(self) -> list[int]:
        """The nodes whose command still runs."""
        return [connection.host.rank for connection in self.by_rank if connection.running]

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
                    connection.errors.write(
                        f"no sign of life for {silent_seconds:.0f} s\n".encode()
                    )
                    connection.kill()
                connection.send(do="beat")

    def _read(self, connection: HostConnection) -> None:
        """In a thread for each host: handle what arrives, until the connection is closed."""
        with connection.stdout:
            for line in connection.stdout:
                # While a stopped terminal blocks this thread, silence says nothing about the host.
                connection.heard = math.inf
                _, token, message = line.partition(self._token.encode())
                if token and line.endswith(b"\n"):
                    self._handle(connection, json.loads(message))
                elif not connection.ready:
                    connection.errors.write(line)  # of the login shell
                connection.heard = time.monotonic()
                self._changed.set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            connection.ssh.wait(_ERRORS_SECONDS)  # until then it may write errors
        connection.closed = True
        if connection.running:
            self._note_end(connection, LOST)
        self._changed.set()

    def _handle(self, connection: HostConnection, message: Mapping[str, Any]) -> None:
        if "line" in message:
            connection.lines.append(message["line"])
            self.on_line(connection.host.rank, message["line"])
        elif "ended" in message:
            self._note_end(connection, message["ended"])
        else:
            connection.ready = True  # its first message is an answer
            connection.answers[message["answer"]] = message

    def _note_end(self, connection: HostConnection, status: int) -> None:
        connection.status = status
        self.ended.append(connection.host.rank)
        connection.running = False  # last: then the main thread reads the others
