"""What ``lab launch`` and ``lab collect`` ask a host, answered there: see remote_agent.py for how this comes to run on it.

Each function of ANSWERS takes a request and ``send``, and returns what can be written as JSON. Only what a Python 3.6 brings
along may be used: hosts with another Python are to be told so.
"""

import base64
import hashlib
import os
import platform
import runpy
import socket
import sys
import tarfile
import threading
import time

_PIECE_BYTES = 192 * 1024
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_CHECKPOINTS = "checkpoints"
_TURN_SECONDS = 0.1
_hushed, _listeners = threading.Event(), []


def facts(request, _send):
    """What is there: the folder, the command's file in it, Python, torch, the digests of the code, addresses."""
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


def _torch():
    try:
        from importlib.metadata import version

        return version("torch")
    except Exception:  # not installed, or a Python before 3.8
        return None


def _code(folder):
    """The digests as the ranks compare them at a start; None where there is no such project."""
    path = os.path.join(folder, "common", "source.py")
    try:
        return runpy.run_path(path)["source_digests"]()
    except Exception:  # of another version, or none at all
        return None


def _addresses():
    """IPv4 addresses of this host's interfaces but loopback."""
    found = []
    if sys.platform.startswith("linux"):
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(
                        one.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15])
                    )
                except OSError:  # it has none
                    continue
                found.append(socket.inet_ntoa(answer[20:24]))
    reached = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return [
        one
        for one in dict.fromkeys(found + reached)
        if not one.startswith("127.") and ":" not in one
    ]


def resolve(request, _send):
    """IPv4 addresses of names as this host knows them, in the names' order."""
    found = []
    for name in request["names"]:
        try:
            found += [
                entry[4][0]
                for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            ]
        except (OSError, UnicodeError):
            continue
    return list(dict.fromkeys(found))


def listen(request, _send):
    """Say the token to everybody who knocks at a port of this host, until ``stop_listening``; OSError where it is taken."""
    door = socket.socket()
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("", request["port"]))
        door.listen(1024)
    except OSError as error:
        door.close()
        raise OSError(error.strerror) from None
    door.settimeout(_TURN_SECONDS)

    def answer():
        with door:
            while not _hushed.is_set():
                try:
                    visitor = door.accept()[0]
                except OSError:
                    continue
                threading.Thread(
                    target=_greet, args=[visitor, request["token"]], daemon=True
                ).start()

    _listeners.append(threading.Thread(target=answer, daemon=True))
    _listeners[-1].start()


def stop_listening(_request, _send):
    """Close the port again; it is free when this returns."""
    _hushed.set()
    for listener in _listeners:
        listener.join()


def _greet(visitor, token):
    with visitor:
        try:
            visitor.settimeout(5)
            visitor.sendall(token.encode())
            visitor.recv(1)  # the visitor closes first, so that the port is free at once
        except OSError:
            pass


def knock(request, _send):
    """Why each of the addresses cannot be reached at the port; "" for those that answer with the token."""
    reasons = {}

    def try_one(address):
        try:
            with socket.create_connection(
                (address, request["port"]), timeout=request["seconds"]
            ) as door:
                answer = door.recv(256).decode("utf-8", "replace")
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
    return dict(dict.fromkeys(request["addresses"], "no answer"), **reasons)


def runs(request, _send):
    """The run folders below a reports folder, by ``<experiment>/<name>``, each with size and SHA-256 of its files: those that
    are named, else those that have changed since a moment of this host's own clock."""
    reports = os.path.join(os.path.expanduser("~"), request["folder"], request["reports"])
    found = {}
    for experiment in _folders(reports):
        for name in _folders(os.path.join(reports, experiment)):
            run = experiment + "/" + name
            if (
                request["names"]
                and run not in request["names"]
                and experiment not in request["names"]
            ):
                continue
            files = _files(os.path.join(reports, experiment, name), request["checkpoints"])
            if not any(path == "config.json" or path.startswith("logs_rank") for path in files):
                continue
            if request["names"] or any(moment >= request["since"] for _, moment in files.values()):
                found[run] = {
                    path: [size, _digest(os.path.join(reports, experiment, name, path))]
                    for path, (size, _) in files.items()
                }
    return {"reports": reports, "runs": found}


def _folders(parent):
    try:
        return sorted(
            name
            for name in os.listdir(parent)
            if not name.startswith(".") and os.path.isdir(os.path.join(parent, name))
        )
    except OSError:
        return []


def _files(run, checkpoints):
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


def _digest(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def pack(request, send):
    """Send the files, given by their path below the reports folder, as one tar archive in pieces."""

    class Pieces:
        def write(self, content):
            send({"piece": base64.b64encode(content).decode()})
            return len(content)

    with tarfile.open(
        fileobj=Pieces(), mode="w|", bufsize=_PIECE_BYTES, format=tarfile.PAX_FORMAT
    ) as archive:
        for path in request["files"]:
            archive.add(os.path.join(request["reports"], path), arcname=path, recursive=False)


ANSWERS = {
    "facts": facts,
    "resolve": resolve,
    "listen": listen,
    "stop_listening": stop_listening,
    "knock": knock,
    "runs": runs,
    "pack": pack,
}
