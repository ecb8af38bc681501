"""The first process of an emulated cluster: it has imported torch, and forks the nodes' programs.

``Cluster`` starts it, in new namespaces unless on loopback, and sends it a ``NodeProgram`` at a
time. Each program gets a parent of its own, which passes signals on and ends what the program
leaves. This process ends when ``Cluster`` closes the socket or its process ends; then the kernel
ends every other process in the namespaces.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from common.utils.processes import adopt_orphans, kill_on_parent_exit
from common.utils.system import batch_scheduling, libc_function, usable_cores
from lab.cluster.network import namespace, namespace_file
from lab.cluster.program import NOT_FOUND, parse_python, preload_modules, reset_forked_state
from lab.fleet.namespaces import enter_namespace
from lab.fleet.supervision import supervise

_PR_SET_NAME = 15  # <sys/prctl.h>


@dataclass(frozen=True)
class NodeProgram:
    """The command of one of ``ranks`` ranks, to start on its node."""

    rank: int
    ranks: int
    node: int
    loopback: bool
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str


def main() -> None:
    """Start the programs that arrive on stdin, a socket, until it is closed."""
    requests = Connection(os.dup(0))
    requests.send("started")
    if "preload" in sys.argv:
        preload_modules()
    requests.send("ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what nobody waits for
    with contextlib.suppress(EOFError, OSError):
        while True:
            program: NodeProgram = requests.recv()
            control = recv_handle(requests)
            output = recv_handle(requests)
            if os.fork() == 0:
                _run(program, control, output)
            os.close(control)
            os.close(output)


def _run(program: NodeProgram, control: int, output: int) -> NoReturn:
    """Run a program in this fork's child, and write its exit status to ``control``."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        with batch_scheduling(program.ranks > usable_cores()):
            pid = os.fork()
            if pid == 0:
                _become(program, output)
        os.close(output)
        if set_name := libc_function("prctl"):  # by which ``Nodes.pids`` finds it
            set_name(_PR_SET_NAME, namespace(program.node).encode())
        os.write(control, b"%d" % supervise(pid, control))
    finally:  # a fork must never return to ``main``
        os._exit(0)


def _become(program: NodeProgram, output: int) -> NoReturn:
    """Turn this fork into the node's program."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if die_with_parent := kill_on_parent_exit():
            die_with_parent()
        if not program.loopback:
            enter_namespace(namespace_file(program.node))
        os.closerange(3, max(map(int, os.listdir("/dev/fd"))) + 1)
        os.environ.clear()
        os.environ.update(program.environment)
        os.chdir(program.folder)
        python = parse_python(program.command) if "torch" in sys.modules else None
        if python is None:
            os.execvpe(program.command[0], list(program.command), program.environment)
        reset_forked_state(
            program.environment, Path(program.folder if python.module else python.target)
        )
        python.run()
    except Exception as error:
        file = getattr(error, "filename", None)
        what = file if file == program.folder else program.command[0]
        os.write(2, f"error: {what}: {getattr(error, 'strerror', error)}\n".encode())
    finally:
        os._exit(NOT_FOUND)
