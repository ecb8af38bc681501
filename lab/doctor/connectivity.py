"""Test whether every node reaches every other one, as Gloo connects them: all to all, at ports that the system chooses.

``ProbeServer`` answers at this node's port while it is open; ``probe_ranks`` connects to the others' ports.
"""

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from lab.doctor.check_result import reason
from lab.doctor.json_messages import accept, receive, send

_AT_ONCE = 16
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 3.0


class ProbeServer:
    """Answers every connection to ``listener`` with this node's rank, in its own thread, until the ``with`` ends."""

    def __init__(self, rank: int, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._rank, self._listener, self._ended = rank, listener, threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> "ProbeServer":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._listener.close()

    def _answer(self) -> None:
        while not self._ended.is_set():
            try:
                connection = accept(self._listener, deadline=time.monotonic() + _POLL_SECONDS)
            except OSError:  # a bound socket that does not listen
                return
            if connection is None:
                continue
            with connection:
                try:
                    soon = time.monotonic() + _ANSWER_SECONDS
                    receive(connection, deadline=soon)
                    send(connection, {"rank": self._rank}, deadline=soon)
                except OSError:
                    pass  # the node that connected reports it


def probe_ranks(
    rank: int, addresses: Mapping[int, tuple[str, int]], limit_seconds: float
) -> dict[int, str]:
    """Connect to every other rank, several at once, each within ``limit_seconds``.

    Returns the reason for each rank that was not reached.
    """
    others = [other for other in addresses if other != rank]
    if not others:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as pool:
        reasons = pool.map(
            lambda other: _probe(rank, other, addresses[other], limit_seconds), others
        )
        return {other: why for other, why in zip(others, reasons, strict=True) if why}


def _probe(rank: int, other: int, address: tuple[str, int], limit_seconds: float) -> str:
    """Return "" where that rank answers, else why not."""
    deadline = time.monotonic() + limit_seconds
    try:
        with socket.create_connection(address, timeout=limit_seconds) as connection:
            send(connection, {"rank": rank}, deadline=deadline)
            answer = receive(connection, deadline=deadline).get("rank")
    except OSError as error:
        return reason(error)
    return "" if answer == other else f"rank {answer} answers there"
