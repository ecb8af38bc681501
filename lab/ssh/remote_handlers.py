"""Handlers of the questions that ``lab launch`` and ``lab collect`` ask a host; they run there.

Each function of HANDLERS takes the values of a request and returns an answer for JSON; see
remote_agent.py. They use only the standard library of Python 3.6 (annotations too, hence the
quotes), so that a host with an old Python can report it.
"""

import base64
import contextlib
import hashlib
import os
import platform
import runpy
import socket
import socketserver
import stat
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE_BYTES = 1 << 22
"""Pieces of a file: each costs a round trip, and must arrive within collect's limit for answers."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def beat() -> None:
    """Answer a heartbeat."""


def facts(folder: str, script: "str | None" = None) -> "dict[str, Any]":
    """Return facts about this host: folder, Python, torch, digests of the code, addresses.

    script : the command's file in the folder.
    """
    path = os.path.join(os.path.expanduser("~"), folder)
    there = os.path.isdir(path)
    return {
        "folder": os.path.realpath(path) if there else path,
        "folder_there": there,
        "script_there": script is None or os.path.isfile(os.path.join(path, script)),
        "python": sys.executable,
        "version": platform.python_version(),
        "torch": _torch(),
        "code": _code(path),
        "name": socket.gethostname(),
        "addresses": _addresses(),
        "clock": time.time(),
    }


def _torch() -> "str | None":
    try:
        from importlib.metadata import version

        return version("torch")
    except Exception:  # not installed, or a Python before 3.8
        return None


def _code(folder: str) -> "dict[str, str] | None":
    """Return the digests that the ranks compare at a start; None if the project is not there."""
    path = os.path.join(folder, "common", "utils", "source_hash.py")
    try:
        return runpy.run_path(path)["source_digests"]()
    except Exception:  # of another version, or none at all
        return None


def _addresses() -> "list[str]":
    """Return the IPv4 addresses of this host's interfaces but loopback."""
    found = []
    if sys.platform.startswith("linux"):
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                interface = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # the interface has no IPv4 address
                    answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, interface)
                    found.append(socket.inet_ntoa(answer[20:24]))
    reached = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    addresses = dict.fromkeys(found + reached)
    return [one for one in addresses if not one.startswith("127.") and ":" not in one]


def resolve(names: "Sequence[str]") -> "list[str]":
    """Return the IPv4 addresses of names as this host knows them, in the names' order."""
    found: dict[str, None] = {}
    for name in names:
        with contextlib.suppress(OSError, UnicodeError):  # the name is unknown here
            entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            found.update((str(address[0]), None) for *_, address in entries)
    return list(found)


_MOST_GUESTS = 100
"""Connections that one address may hold; several hosts may share one (NAT)."""
_guests: "Counter[str]" = Counter()
_lock = threading.Lock()


class _TokenServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def verify_request(self, request: "Any", client_address: "Any") -> bool:
        """Return whether the address may hold another connection; else the server closes it."""
        with _lock:
            room = _guests[client_address[0]] < _MOST_GUESTS
            _guests[client_address[0]] += room
        return room


_servers: "list[_TokenServer]" = []


def listen(addresses: "Sequence[str]", port: int, token: str) -> None:
    """Send the token to everyone who connects to a port of these addresses of this host.

    Ends with ``stop_listening``. OSError if the port is taken.
    """

    class SendToken(socketserver.StreamRequestHandler):
        timeout = 5

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(token.encode())
                self.connection.recv(1)  # the client closes first, so that the port is free at once
            with _lock:
                _guests[self.client_address[0]] -= 1

    for address in addresses:
        server = _TokenServer((address, port), SendToken)
        threading.Thread(target=server.serve_forever, args=[0.1], daemon=True).start()
        _servers.append(server)


def stop_listening() -> None:
    """Close the port again; it is free when this returns."""
    for server in _servers:
        server.shutdown()
        server.server_close()


def connect(addresses: "Sequence[str]", port: int, token: str, seconds: float) -> "dict[str, str]":
    """Return why each address cannot be reached at the port; "" if it sends the token."""

    def try_one(address: str) -> str:
        try:
            with socket.create_connection((address, port), timeout=seconds) as client:
                answer = client.recv(256).decode("utf-8", "replace")
        except OSError as error:
            late = isinstance(error, socket.timeout)  # no TimeoutError before Python 3.10
            return "no answer" if late else (error.strerror or str(error)).lower()
        return "" if answer == token else "another program answers"

    with ThreadPoolExecutor(1 + len(addresses)) as pool:
        return dict(zip(addresses, pool.map(try_one, addresses)))  # noqa: B905 - of Python 3.10


def runs(
    folder: str, reports: str, names: "Sequence[str]", since: float, checkpoints: bool
) -> "dict[str, Any]":
    """Return the runs below a reports folder, by ``<experiment>/<name>``, with their files.

    names : of runs or experiments; none: the runs that changed after ``since``, a time of this
    host's own clock. Of each file: [size in bytes, SHA-256].
    """
    root = Path(os.path.expanduser("~"), folder, reports)
    found = {}
    for run in sorted(path for path in root.glob("[!.]*/[!.]*") if path.is_dir()):
        name = str(run.relative_to(root))
        if names and name not in names and run.parent.name not in names:
            continue
        files = _files(run, checkpoints)
        is_run = any(path == "config.json" or path.startswith("logs_rank") for path in files)
        if is_run and (names or any(one.st_mtime >= since for one in files.values())):
            digests = {path: _digest(run / path) for path in files}
            found[name] = {
                path: [files[path].st_size, digest]
                for path, digest in digests.items()
                if digest is not None
            }
    return {"reports": str(root), "runs": found}


def _digest(path: Path) -> "str | None":
    """Return the SHA-256 of a file; None if the run has just deleted it."""
    with contextlib.suppress(FileNotFoundError):
        return _digest_of_existing(path)
    return None


def _digest_of_existing(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            sha256.update(piece)
    return sha256.hexdigest()


def _files(run: Path, checkpoints: bool) -> "dict[str, os.stat_result]":
    """Return the status of each file of a run, without hidden files: they are unfinished."""
    found = {}
    for path in run.rglob("*"):
        name = path.relative_to(run)
        if path.name.startswith(".") or (name.parts[0] == "checkpoints" and not checkpoints):
            continue
        with contextlib.suppress(FileNotFoundError):  # the run has just deleted it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[str(name)] = status
    return found


def read(reports: str, path: str, offset: int) -> "list[Any] | None":
    """Return inode and size of a file below the reports folder, and a piece of it in base64.

    None if there is no such file any more.
    """
    try:
        with open(os.path.join(reports, path), "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(offset)
            piece = base64.b64encode(file.read(_PIECE_BYTES)).decode()
            return [status.st_ino, status.st_size, piece]
    except FileNotFoundError:
        return None


HANDLERS = {
    "beat": beat,
    "facts": facts,
    "resolve": resolve,
    "listen": listen,
    "stop_listening": stop_listening,
    "connect": connect,
    "runs": runs,
    "read": read,
}
