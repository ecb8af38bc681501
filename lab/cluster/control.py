"""Reach a running cluster from another terminal: disturb a node, or run a command in it.

``lab cluster run`` answers requests while it is in ``served``; ``find`` and ``ask`` reach it, and
``enter`` runs a command in a node. The sockets are abstract Unix sockets: they have no file, and
the kernel removes them with their process.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from common.errors import UserError
from common.utils.processes import shell_status
from lab.cluster import network
from lab.cluster.cluster import Cluster
from lab.cluster.program import NOT_FOUND

_MOST_BYTES = 65536
_ANSWER_SECONDS, _CLOSE_SECONDS = 70.0, 5.0


class ClusterFacts(TypedDict, total=False):
    """The answer to other terminals: nodes, their process on the host, token; or an error."""

    nodes: int
    loopback: bool
    host: int
    token: str
    error: str


def _name(pid: int | str) -> str:
    return f"data-parallel-lab.cluster.{os.getuid()}.{pid}"


@contextlib.contextmanager
def served(cluster: Cluster) -> Iterator[None]:
    """Answer requests of this user's other terminals; Linux only, for its abstract sockets."""
    if sys.platform != "linux":
        yield
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{_name(os.getpid())}")
        listener.listen()
        answering = threading.Thread(target=_serve, args=[listener, cluster], daemon=True)
        answering.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # Killing a node ends the run, and whoever asked for that still awaits the answer.
        answering.join(_CLOSE_SECONDS)


def _serve(listener: socket.socket, cluster: Cluster) -> None:
    """Answer one request after the other until the listener is shut down; runs in a thread."""
    from common.utils.typed_json import decode  # slow to import, and --help imports this file

    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_ANSWER_SECONDS)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                _, user, _ = struct.unpack("3i", credentials)
                if user in (0, os.getuid()):  # abstract sockets have no permissions
                    request = decode(
                        connection.recv(_MOST_BYTES),
                        dict[str, int | str | None],
                        name="the request",
                    )
                    connection.sendall(json.dumps(_answer(cluster, request)).encode())


def _answer(cluster: Cluster, fault: Mapping[str, Any]) -> ClusterFacts:
    """Cause the fault, if any; return facts about the cluster for other terminals, or an error."""
    try:
        if fault:
            cluster.fault(**fault)
        return {
            "nodes": cluster.nodes,
            "loopback": cluster.loopback,
            "host": cluster.host_pid,
            "token": cluster.token,
        }
    except (UserError, RuntimeError, TypeError) as error:  # TypeError: no such argument
        return {"error": str(error)}


def find(pid: int | None) -> int:
    """Return the process id of a ``lab cluster run`` of this user: ``pid``, or the only one.

    Raises UserError if none runs, if ``pid`` is none of them, or if several run and ``pid`` is
    None.
    """
    if sys.platform != "linux":
        raise UserError(
            f"a running cluster can be reached only on Linux, and this is {sys.platform}"
        )
    names = Path("/proc/net/unix").read_text().split()
    running = sorted(
        {int(name.rpartition(".")[2]) for name in names if name.startswith(f"@{_name('')}")}
    )
    if not running:
        raise UserError(
            "none of your clusters is running: "
            "start one in another terminal with lab cluster run --nodes 4 -- COMMAND"
        )
    if pid is None and len(running) == 1:
        return running[0]
    if pid not in running:
        got = "several clusters are running" if pid is None else f"--cluster: got {pid}"
        raise UserError(
            f"{got}: give --cluster, one of {', '.join(map(str, running))} "
            "(process ids of lab cluster run)"
        )
    return pid


def ask(pid: int, **fault: Any) -> ClusterFacts:
    """Ask the ``lab cluster run`` with this process id for its nodes, loopback, host and token.

    fault : arguments of ``Cluster.fault``, to cause a fault first; none: only ask.
    Raises UserError if the cluster refuses or does not answer.
    """
    from common.utils.typed_json import decode

    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(f"\0{_name(pid)}")
            connection.sendall(json.dumps(fault).encode())
            answer = connection.recv(_MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"cluster {pid} does not answer ({error.strerror or error}): check that its "
            "lab cluster run still runs"
        ) from error
    found: ClusterFacts = {"error": "the cluster has ended"}
    if answer:
        found = decode(answer, ClusterFacts, name=f"the answer of cluster {pid}")
    if "error" in found:
        raise UserError(found["error"])
    return found


def enter(host: int, node: int, command: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run a command in a node; return its exit status, or 128 + n if signal n ended it.

    ``host`` is the first process in the cluster's namespaces. This process joins those namespaces
    and stays in them. Raises UserError if it may not.
    """
    folder = os.getcwd()
    try:
        for kind in ("user", "pid", "mnt"):  # mnt hides this /proc, and shows the nodes' networks
            namespace = Path(f"/proc/{host}/ns/{kind}")
            if not namespace.samefile(f"/proc/self/ns/{kind}"):
                network.enter_namespace(namespace)
        network.enter_namespace(network.namespace_file(node))
    except OSError as error:
        raise UserError(
            f"node {node} cannot be entered ({error.strerror}): "
            "use the account that started the cluster"
        ) from error
    try:
        process = subprocess.Popen(command, cwd=folder, env=environment)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    return shell_status(process.wait())
