"""Reaching a running cluster from another terminal: to hurt a node, or to open a shell in it.

``served`` lets ``lab cluster run`` be found, ``find`` finds it, ``ask`` asks it, ``enter`` runs a command in a node. The sockets
are abstract ones, which the kernel takes away with their process: no file is left behind.
"""

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UserError
from lab.cluster import network
from lab.cluster.cluster import Cluster

_MOST_BYTES = 65536
_ANSWER_SECONDS = 70.0
_NOT_FOUND = 127
# In the order in which they can be entered; the network comes last, since its name is known only within.
_NAMESPACES = {"user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000}
_NETWORK = 0x40000000


def _prefix() -> str:
    return f"data-parallel-lab.cluster.{os.getuid()}."


@contextlib.contextmanager
def served(cluster: Cluster) -> Iterator[None]:
    """Answer requests about ``cluster`` from this user's other terminals; only Linux has such sockets."""
    if sys.platform != "linux":
        yield
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{_prefix()}{os.getpid()}")
        listener.listen()
        threading.Thread(target=_serve, args=[listener, cluster], daemon=True).start()
        yield
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _serve(listener: socket.socket, cluster: Cluster) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_ANSWER_SECONDS)
            _, user, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if user in (0, os.getuid()):  # abstract sockets have no permissions
                connection.sendall(
                    json.dumps(_answer(cluster, json.loads(connection.recv(_MOST_BYTES)))).encode()
                )


def _answer(cluster: Cluster, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if request["do"] == "fault":
            cluster.fault(request["node"], request["fault"], rate=request["rate"])
        return {"nodes": cluster.nodes, "loopback": cluster.loopback, "host": cluster.host_pid}
    except (UserError, RuntimeError) as error:
        return {"error": str(error)}


def find(pid: int | None) -> int:
    """Return the process id of this user's ``lab cluster run``; UserError where there is none, or several and ``pid`` chooses
    none of them."""
    if sys.platform != "linux":
        raise UserError(
            f"a running cluster can be reached on Linux alone, and this is {sys.platform}"
        )
    names = {
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if f" @{_prefix()}" in line
    }
    running = sorted(int(name.rpartition(".")[2]) for name in names)
    if not running:
        raise UserError(
            "no cluster of yours is running: start one in another terminal with lab cluster run --nodes 4 -- COMMAND"
        )
    if pid is None and len(running) == 1:
        return running[0]
    if pid not in running:
        raise UserError(
            f"--cluster: got {pid}, choose one of {', '.join(map(str, running))} (process ids of lab cluster run)"
        )
    return pid


def ask(pid: int, **request: Any) -> dict[str, Any]:
    """Send a request to the cluster of that process and return the answer; UserError where it refuses."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(f"\0{_prefix()}{pid}")
            connection.sendall(json.dumps(request).encode())
            answer = json.loads(
                connection.recv(_MOST_BYTES) or b'{"error": "the cluster has ended"}'
            )
    except OSError as error:
        raise UserError(
            f"the cluster of process {pid} does not answer ({error.strerror or error})"
        ) from error
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def enter(host: int, node: int, command: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run a command in a node of the cluster whose first process is ``host``; return its exit status, 128 + n after signal n.

    This process joins the cluster's namespaces and stays in them.
    """
    folder = os.getcwd()
    opened = [
        (os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY), flag)
        for name, flag in _NAMESPACES.items()
        if os.readlink(f"/proc/{host}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    ]
    for descriptor, flag in opened:
        _join(descriptor, flag)
        os.close(descriptor)
    with network.namespace_file(node).open() as file:
        _join(file.fileno(), _NETWORK)
    child = os.fork()  # only what is started from now on is in the namespace of processes
    if child == 0:
        _become(command, folder, environment)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> NoReturn:
    try:
        os.chdir(folder)
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        os.write(2, f"error: {command[0]}: {error.strerror}\n".encode())
    os._exit(_NOT_FOUND)


def _join(descriptor: int, flag: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, flag) != 0:
        raise UserError(
            f"the node cannot be entered ({os.strerror(ctypes.get_errno())}): use the account that started the "
            "cluster"
        )
