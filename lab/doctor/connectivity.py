"""Connections between doctors: JSON messages, and a test that every node reaches every other.

A message is a JSON object on one line; every wait for one has a deadline (of ``time.monotonic``).
Gloo and NCCL connect all nodes to each other, at ports that the system chooses, and so does the
test: ``answer_probes`` answers at this node's port, ``probe_ranks`` connects to the others' ports.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import UserError
from common.utils.typed_json import decode
from lab.doctor.check_result import reason

_LONGEST_BYTES = 1 << 20
_AT_ONCE = 16
_POLL_SECONDS = 0.2


def seconds_until(deadline: float) -> float:
    """Return the seconds left, for ``settimeout``: never 0, which would mean not to wait."""
    return max(0.001, deadline - time.monotonic())


def send(connection: socket.socket, message: Mapping[str, Any], *, deadline: float) -> None:
    """Send one message. Raises OSError, TimeoutError after the deadline."""
    connection.settimeout(seconds_until(deadline))
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, *, deadline: float) -> dict[str, Any]:
    """Return the next message. The two ends take turns, so nothing follows it yet.

    Raises OSError if the other end closes, sends no JSON object (another program), or sends
    nothing; TimeoutError after the deadline.
    """
    content = b""
    while b"\n" not in content and len(content) <= _LONGEST_BYTES:
        connection.settimeout(seconds_until(deadline))
        piece = connection.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("it closed the connection")
        content += piece
    try:
        return decode(content, dict[str, Any], name="the message")
    except UserError as error:
        raise OSError("the other end is not lab doctor") from error


@contextlib.contextmanager
def answer_probes(rank: int, listener: socket.socket) -> Iterator[None]:
    """Answer every connection to ``listener`` with this node's rank, until the ``with`` ends.

    Closes ``listener`` at the end.
    """
    ended = threading.Event()
    listener.settimeout(_POLL_SECONDS)

    def answer() -> None:
        while not ended.is_set():
            # No connection within the timeout, or one that broke: the other end reports it.
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                send(connection, {"rank": rank}, deadline=time.monotonic() + _POLL_SECONDS)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        listener.close()


def probe_ranks(
    rank: int, addresses: Iterable[tuple[int, str, int]], limit_seconds: float
) -> list[tuple[int, str]]:
    """Connect to every other rank, several at once, each within ``limit_seconds``.

    addresses : rank, host and port of each node. Returns the ranks that were not reached, in
    order, each with the reason.
    """
    others = sorted(address for address in addresses if address[0] != rank)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = pool.map(lambda address: _probe(address, limit_seconds), others)
        return [(other, why) for (other, *_), why in zip(others, reasons, strict=True) if why]


def _probe(address: tuple[int, str, int], limit_seconds: float) -> str:
    """Return why that rank does not answer; "" if it does."""
    rank, host, port = address
    deadline = time.monotonic() + limit_seconds
    try:
        with socket.create_connection((host, port), timeout=limit_seconds) as connection:
            answer = receive(connection, deadline=deadline).get("rank")
    except OSError as error:
        return reason(error)
    return "" if answer == rank else f"rank {answer} answers there"
