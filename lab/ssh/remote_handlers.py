"""Handlers of what ``lab launch`` and ``lab collect`` ask a host. They run there; see remote_agent.py for how.

Each function of HANDLERS takes a request and ``send``, and returns what can be written as JSON. They use the standard library of
Python 3.6 alone (also in annotations, hence the quotes), so that hosts with an old Python can report it.
"""

import base64
import hashlib
import io
import os
import platform
import runpy
import socket
import sys
import tarfile
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Request = dict[str, Any]
    Send = Callable[[dict[str, Any]], None]

_PIECE_BYTES = 192 * 1024
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_CHECKPOINTS = "checkpoints"
_TURN_SECONDS = 0.1
_stop_listening = threading.Event()
_listeners: "list[threading.Thread]" = []


def facts(request: "Request", _send: "Send") -> "dict[str, Any]":
    """Facts about this host: the folder, the command's file in it, Python, torch, the digests of the code, addresses."""
    folder = os.path.join(os.path.expanduser("~"), request["folder"])
    there = os.path.isdir(folder)
    script = request.get("script")
    return {
        "folder": os.path.realpath(folder) if there else folder,
        "folder_there": there,
        "script_there": script is None or os.path.isfile(os.path.join(folder, script)),
        "python": sys.executable,
        "version": platform.python_version(),
        "torch": _torch(),
        "code": _code(folder),
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
    """The digests as the ranks compare them at a start; None where there is no such project."""
    path = os.path.join(folder, "common", "utils", "source_hash.py")
    try:
        return runpy.run_path(path)["source_digests"]()
    except Exception:  # of another version, or none at all
        return None


def _addresses() -> "list[str]":
    """IPv4 addresses of this host's interfaces but loopback."""
    found = []
    if sys.platform.startswith("linux"):
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                interface = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, interface)
                except OSError:  # it has none
                    continue
                found.append(socket.inet_ntoa(answer[20:24]))
    reached = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    addresses = dict.fromkeys(found + reached)
    return [one for one in addresses if not one.startswith("127.") and ":" not in one]


def resolve(request: "Request", _send: "Send") -> "list[str]":
    """IPv4 addresses of names as this host knows them, in the names' order."""
    found: dict[str, None] = {}
    for name in request["names"]:
        try:
            entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        found.update((str(address[0]), None) for *_, address in entries)
    return list(found)


def listen(request: "Request", _send: "Send") -> None:
    """Send the token to everyone who connects to a port of this host, until ``stop_listening``; OSError where it is taken."""
    server = socket.socket()
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", request["port"]))
        server.listen(1024)
    except OSError as error:
        server.close()
        raise OSError(error.strerror) from None
    server.settimeout(_TURN_SECONDS)

    def accept() -> None:
        with server:
            while not _stop_listening.is_set():
                try:
                    client = server.accept()[0]
                except OSError:
                    continue
                arguments = [client, request["token"]]
                threading.Thread(target=_send_token, args=arguments, daemon=True).start()

    _listeners.append(threading.Thread(target=accept, daemon=True))
    _listeners[-1].start()


def stop_listening(_request: "Request", _send: "Send") -> None:
    """Close the port again; it is free when this returns."""
    _stop_listening.set()
    for listener in _listeners:
        listener.join()


def _send_token(client: socket.socket, token: str) -> None:
    with client:
        try:
            client.settimeout(5)
            client.sendall(token.encode())
            client.recv(1)  # the client closes first, so that the port is free at once
        except OSError:
            pass


def connect(request: "Request", _send: "Send") -> "dict[str, str]":
    """Why each of the addresses cannot be reached at the port; "" for those that answer with the token."""
    reasons = dict.fromkeys(request["addresses"], "no answer")

    def try_one(address: str) -> None:
        try:
            with socket.create_connection(
                (address, request["port"]), timeout=request["seconds"]
            ) as client:
                answer = client.recv(256).decode("utf-8", "replace")
            reasons[address] = "" if answer == request["token"] else "another program answers"
        except OSError as error:
            late = isinstance(error, socket.timeout)  # no TimeoutError before Python 3.10
            reasons[address] = "no answer" if late else (error.strerror or str(error)).lower()

    threads = [
        threading.Thread(target=try_one, args=[address], daemon=True)
        for address in request["addresses"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * request["seconds"])
    return dict(reasons)


def runs(request: "Request", _send: "Send") -> "dict[str, Any]":
    """The run folders below a reports folder, by ``<experiment>/<name>``, each with size and SHA-256 of its files: those that
    are named, else those that have changed since a moment of this host's own clock."""
    reports = os.path.join(os.path.expanduser("~"), request["folder"], request["reports"])
    names, found = request["names"], {}
    for experiment in _folders(reports):
        for name in _folders(os.path.join(reports, experiment)):
            run = experiment + "/" + name
            if names and run not in names and experiment not in names:
                continue
            folder = os.path.join(reports, experiment, name)
            files = _files(folder, request["checkpoints"])
            if not any(path == "config.json" or path.startswith("logs_rank") for path in files):
                continue
            if names or any(changed >= request["since"] for _, changed in files.values()):
                found[run] = {
                    path: [size, _digest(os.path.join(folder, path))]
                    for path, (size, _) in files.items()
                }
    return {"reports": reports, "runs": found}


def _folders(parent: str) -> "list[str]":
    try:
        return sorted(
            name
            for name in os.listdir(parent)
            if not name.startswith(".") and os.path.isdir(os.path.join(parent, name))
        )
    except OSError:
        return []


def _files(run: str, checkpoints: bool) -> "dict[str, tuple[int, float]]":
    """Size and time of change of each file of a run, by its path in it; unfinished ones begin with a dot."""
    found = {}
    for folder, inner, names in os.walk(run):
        if not checkpoints and os.path.relpath(folder, run) == ".":
            inner[:] = [name for name in inner if name != _CHECKPOINTS]
        for name in names:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path) and not os.path.islink(path):
                status = os.stat(path)
                found[os.path.relpath(path, run)] = status.st_size, status.st_mtime
    return found


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def pack(request: "Request", send: "Send") -> None:
    """Send the files, given by their path below the reports folder, as one tar archive in pieces."""

    class Pieces(io.BufferedIOBase):
        def write(self, content: Any) -> int:
            send({"piece": base64.b64encode(content).decode()})
            return len(content)

    kind = tarfile.PAX_FORMAT
    with tarfile.open(fileobj=Pieces(), mode="w|", bufsize=_PIECE_BYTES, format=kind) as archive:
        for path in request["files"]:
            archive.add(os.path.join(request["reports"], path), arcname=path, recursive=False)


HANDLERS = {
    "facts": facts,
    "resolve": resolve,
    "listen": listen,
    "stop_listening": stop_listening,
    "connect": connect,
    "runs": runs,
    "pack": pack,
}
