"""Each node knocks at the door of each other one: Gloo connects all to all, at ports that the system chooses.

``ProbeServer`` answers at this node's door while it is open, ``cross`` knocks at the others'.
"""

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from lab.doctor.check_result import reason
from lab.doctor.wire import accept, receive, send

_AT_ONCE = 16
_TURN_SECONDS = 0.2
_ANSWER_SECONDS = 3.0


class ProbeServer:
    """Says "rank r" to everybody who knocks at ``door``, in a thread of its own, until the ``with`` ends."""

    def __init__(self, rank: int, door: socket.socket) -> None:
        self.port: int = door.getsockname()[1]
        self._rank, self._door, self._ended = rank, door, threading.Event()
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
        self._door.close()

    def _answer(self) -> None:
        while not self._ended.is_set():
            try:
                visitor = accept(self._door, deadline=time.monotonic() + _TURN_SECONDS)
            except OSError:  # a door that does not listen
                return
            if visitor is None:
                continue
            with visitor:
                try:
                    soon = time.monotonic() + _ANSWER_SECONDS
                    receive(visitor, deadline=soon)
                    send(visitor, {"rank": self._rank}, deadline=soon)
                except OSError:
                    pass  # who knocked tells of it


def cross(rank: int, doors: Mapping[int, tuple[str, int]], limit_seconds: float) -> dict[int, str]:
    """Knock at every other rank's door, several at once, each within ``limit_seconds``; return, by rank, why those not reached
    were not."""
    others = [other for other in doors if other != rank]
    if not others:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as pool:
        answers = pool.map(lambda other: _knock(rank, other, doors[other], limit_seconds), others)
        return {other: why for other, why in zip(others, answers, strict=True) if why}


def _knock(rank: int, other: int, door: tuple[str, int], limit_seconds: float) -> str:
    """Return "" where that rank answers, else why not."""
    deadline = time.monotonic() + limit_seconds
    try:
        with socket.create_connection(door, timeout=limit_seconds) as connection:
            send(connection, {"rank": rank}, deadline=deadline)
            answer = receive(connection, deadline=deadline).get("rank")
    except OSError as error:
        return reason(error)
    return "" if answer == other else f"rank {answer} answers there"
