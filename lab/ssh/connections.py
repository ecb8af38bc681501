"""``HostConnections``: a connection to each host, with the keeper at its other end. All of them end with the ``with``.

Order: ``HostConnections(...)`` as a context manager, ``ask`` what is to be known first, ``start`` a
command on each, ``wait``; perhaps ``signal`` or ``kill`` meanwhile. One thread reads from all hosts
and one sends the beats without which they would end by themselves, so that neither a slow terminal
nor a busy caller loses a host."""

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
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        way: SSHOptions,
        *,
        on_line: Callable[[int, str], object] = lambda node, line: None,
        on_piece: Callable[[str], object] = lambda piece: None,
    ) -> None:
        self.hosts, self._way, self.on_line, self.on_piece = hosts, way, on_line, on_piece
        self.nodes: list[HostConnection] = []
        self.ended: list[int] = []
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._selector = selectors.DefaultSelector()
        self._new: deque[HostConnection] = (
            deque()
        )  # not yet known to the reader, whose selector is its own
        self._hung_up: list[HostConnection] = []
        self._token, self._requests, self._turned = secrets.token_hex(16), 0, time.monotonic()
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._read, self._beat)
        ]

    @property
    def silence_seconds(self) -> float:
        """After which a connection without a sign of life counts as broken."""
        return self._way.silence_seconds

    def __enter__(self) -> "HostConnections":
        spec = (
            json.dumps(
                {"token": self._token, "silence_seconds": self._way.silence_seconds}
            ).encode()
            + b"\n"
        )
        first = program() + spec
        for thread in self._threads:
            thread.start()
        try:
            for host in self.hosts:
                self.wait(
                    lambda: (
                        sum(not node.ready and not node.closed for node in self.nodes) < _AT_ONCE
                    ),
                    limit_seconds=_TURN_SECONDS,
                )
                self.nodes.append(HostConnection.open(host, self._way, first))
                self._new.append(self.nodes[-1])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on every host, and the connections; return when those are gone."""
        self._closing.set()
        for node in self.nodes:
            with contextlib.suppress(OSError):
                node.ssh.stdin.close()  # the keeper ends everything when its input closes
        deadline = time.monotonic() + _LEAVE_SECONDS
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.ssh.wait(max(0.0, deadline - time.monotonic()) if node.ready else 0)
            node.kill()
            node.ssh.wait()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        self._selector.close()
        for node in self.nodes:
            node.ssh.stdout.close()
            node.ssh.stderr.close()

    def wait_until_ready(self, limit_seconds: float) -> None:
        """Wait until each keeper has answered or its connection has failed: ``HostConnection.ready`` says which."""
        self.wait(
            lambda: all(node.ready or node.closed for node in self.nodes),
            limit_seconds=limit_seconds,
        )

    def ask(
        self, what: str, *, nodes: Sequence[int], limit_seconds: float, **more: Any
    ) -> dict[int, Mapping[str, Any]]:
        """Ask several hosts the same at once; return by node {"result": …} or {"error": why}, also where no answer came."""
        self._requests += 1
        number, asked = self._requests, [self.nodes[node] for node in nodes]
        for node in asked:
            node.tell(do=what, id=number, **more)
        self.wait(
            lambda: all(number in node.answers or node.closed for node in asked),
            limit_seconds=limit_seconds,
        )
        none = {"error": f"no answer within {limit_seconds:g} s"}
        return {
            node.host.rank: node.answers.pop(
                number, {"error": "the connection broke"} if node.closed else none
            )
            for node in asked
        }

    def start(
        self, node: int, command: Sequence[str], *, environment: Mapping[str, str], folder: str
    ) -> None:
        """Start a command on a host and return at once; ``environment`` counts where the host has no value of its own."""
        one = self.nodes[node]
        with self._changed:
            one.running, one.status = not one.closed, None
            one.lines.clear()
        if one.closed:
            self._ended(one, LOST)
        one.tell(do="start", command=list(command), environment=dict(environment), folder=folder)

    def signal(self, number: int) -> None:
        """Send a signal to the commands that still run, as a terminal does."""
        for node in self.nodes:
            if node.running:
                node.tell(do="signal", signal=number)

    def kill(self) -> None:
        """Kill all processes of the commands that still run."""
        for node in self.nodes:
            if node.running:
                node.tell(do="kill")

    @property
    def running(self) -> list[int]:
        """The hosts whose command still runs."""
        return [node.host.rank for node in self.nodes if node.running]

    def wait(self, condition: Callable[[], bool], *, limit_seconds: float | None = None) -> bool:
        """Wait until ``condition`` holds, looked at when something has changed; return whether it does."""
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        with self._changed:
            while not condition():
                if deadline is not None and time.monotonic() > deadline:
                    return False
                self._changed.wait(_POLL_SECONDS)
        return True

    def _beat(self) -> None:
        """In a thread of its own: send the beats, and give up those that have not answered any for too long."""
        between = self.silence_seconds / 6
        while not self._closing.wait(between):
            now = time.monotonic()
            for node in self.nodes:
                if not node.ready or node.closed:
                    continue
                # Where the reader itself is held up, by a terminal that is stopped, silence says nothing of the host.
                if now - node.heard > self.silence_seconds and now - self._turned < max(
                    between, 1.0
                ):
                    node.complain(f"no sign of life for {now - node.heard:.0f} s\n".encode())
                    node.kill()
                node.tell(do="beat")

    def _read(self) -> None:
        """In a thread of its own: take what comes from all hosts, until all connections are closed."""
        while self._selector.get_map() or self._new or not self._closing.is_set():
            self._turned = time.monotonic()
            while self._new:
                node = self._new.popleft()
                for stream in (node.ssh.stdout, node.ssh.stderr):
                    self._selector.register(stream, selectors.EVENT_READ, node)
            for key, _ in self._selector.select(_POLL_SECONDS):
                node, text = key.data, os.read(key.fd, _READ_BYTES)
                if text and key.fileobj is node.ssh.stdout:
                    self._take(node, text)
                elif text:
                    node.complain(text)
                if text:
                    continue
                self._selector.unregister(key.fileobj)
                node.hung_up = time.monotonic()
                self._hung_up.append(node)
            self._notice_closed()

    def _notice_closed(self) -> None:
        """A connection is closed when nothing comes from it any more; a master of ssh may keep its errors open for ever."""
        for node in list(self._hung_up):
            still = [
                stream
                for stream in (node.ssh.stdout, node.ssh.stderr)
                if stream in self._selector.get_map()
            ]
            if node.closed:
                self._hung_up.remove(node)
            elif not still or (
                still == [node.ssh.stderr] and time.monotonic() > node.hung_up + _ERRORS_SECONDS
            ):
                for stream in still:
                    self._selector.unregister(stream)
                self._closed(node)

    def _take(self, node: HostConnection, text: bytes) -> None:
        *lines, node.rest = (node.rest + text).split(b"\n")
        node.heard = time.monotonic()
        for line in lines:
            if node.ready:
                message = None
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                if isinstance(message, dict):  # else what a login shell says at its end
                    self._take_message(node, message)
            elif line.endswith(self._token.encode()):
                with self._changed:
                    node.ready = True
                    self._changed.notify_all()
            else:
                node.complain(line + b"\n")

    def _take_message(self, node: HostConnection, message: Mapping[str, Any]) -> None:
        if "line" in message:
            node.lines.append(message["line"])
            self.on_line(node.host.rank, message["line"])
        elif "piece" in message:
            self.on_piece(message["piece"])
        elif "ended" in message:
            self._ended(node, message["ended"])
        elif "killed" in message:
            node.complain(
                f"lab's own process there was killed by signal {message['killed']}\n".encode()
            )
        elif "answer" in message:
            with self._changed:
                node.answers[message["answer"]] = message
                self._changed.notify_all()

    def _closed(self, node: HostConnection) -> None:
        with self._changed:
            node.closed = True
            self._changed.notify_all()
        if node.running:
            self._ended(node, LOST)

    def _ended(self, node: HostConnection, status: int) -> None:
        with self._changed:
            node.running, node.status = False, status
            self.ended.append(node.host.rank)
            self._changed.notify_all()
