"""Messages between doctors: JSON after its length (4 bytes, big-endian), over plain sockets; every wait has a deadline.

A message is an object. One that is longer than a megabyte, cut or not JSON raises OSError: the other end is another program.
"""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 20


def send(connection: socket.socket, message: Mapping[str, Any], *, deadline: float) -> None:
    """Send one message. ``deadline`` is a time of ``time.monotonic``; OSError (TimeoutError) where it passes."""
    content = json.dumps(message).encode()
    connection.settimeout(_left(deadline))
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket, *, deadline: float) -> dict[str, Any]:
    """Return the next message; OSError where it does not come whole before the deadline, or is none."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline=deadline))
    if length > _LONGEST:
        raise OSError("no lab doctor at the other end")
    try:
        message = json.loads(_read(connection, length, deadline=deadline))
    except ValueError as error:
        raise OSError("no lab doctor at the other end") from error
    if not isinstance(message, dict):
        raise OSError("no lab doctor at the other end")
    return message


def listen(port: int = 0) -> socket.socket:
    """Return a socket that listens on all addresses (0: a free port). OSError where the port is taken."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket, *, deadline: float) -> socket.socket | None:
    """Return the next connection; None where none came before the deadline."""
    with contextlib.suppress(TimeoutError):
        listener.settimeout(_left(deadline))
        return listener.accept()[0]
    return None


def _read(connection: socket.socket, size: int, *, deadline: float) -> bytes:
    content = b""
    while len(content) < size:
        connection.settimeout(_left(deadline))
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        content += piece
    return content


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer")
    return left
