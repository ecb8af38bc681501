"""Start programs as users do, ``PartX/main.py`` and ``python -m lab``, with a limit on every wait.

Most are forked from a server that has imported torch, which saves 3 to 10 s each; ``cold=True``
starts a new interpreter, as users do. Only forked programs know ``--model tiny``.
"""

import contextlib
import functools
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lab.cluster.program import PythonProgram, reset_forked_state
from lab.proofs import ranks
from tests.helpers.paths import ROOT
from tests.helpers.waiting import wait_until

TINY = ("--model", "tiny")


def free_port():
    """Return a TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def running_in(folder):
    """Return the other processes whose current folder this is; zombies have none."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder) and process.pid != os.getpid():
                found.append(process.pid)
    return found


@dataclass
class Ended:
    """The result of a process: exit status, output, errors, and seconds from start to end."""

    status: int
    out: str
    err: str
    seconds: float


_started: "list[Started]" = []


def kill_started():
    """Kill every process that a test left running, and remove the folders of all of them."""
    while _started:
        one = _started.pop()
        one.kill()
        shutil.rmtree(one.folder)


class Started:
    """A running program; ``end`` waits for it, with a limit, and returns its result.

    Parameters
    ----------
    command : the interpreter, the script or ``-m`` and a module, and the arguments.
    forked : fork from a server that has imported torch.
    """

    def __init__(self, command, *, cwd, env, forked=False):
        self._began = time.monotonic()
        self.folder = Path(tempfile.mkdtemp())
        self._out, self._err = self.folder / "out", self.folder / "err"
        self._out.touch()
        self._err.touch()
        if forked:
            self.process: Any = ForkedProgram(command, cwd, env, self._out, self._err)
        else:
            with self._out.open("w") as out, self._err.open("w") as err:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
                self.process = subprocess.Popen(
                    command, cwd=cwd, env=env, start_new_session=True, **streams
                )
        _started.append(self)

    def kill(self):
        """Kill the program, if it still runs, and its process group."""
        if self.process.poll() is None:
            for kill in (os.killpg, os.kill):  # a fork may not lead its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def read_out(self):
        """Return what the program has printed so far."""
        return self._out.read_text()

    def read_err(self):
        """Return what the program has printed to stderr so far."""
        return self._err.read_text()

    def wait_for(self, text, *, timeout_seconds=60):
        """Return once ``text`` is in the output.

        Raises AssertionError if the program ends or ``timeout_seconds`` pass before.
        """

        def there():
            running = self.process.poll() is None
            if text in self.read_out():
                return True
            assert running, f"ended before {text!r}:\n{self.read_out()}\n{self._err.read_text()}"
            return False

        wait_until(there, f"{text!r} in the output", timeout_seconds=timeout_seconds)

    def send(self, number):
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def end(self, *, timeout_seconds=120):
        """Wait for the end and return the result.

        After ``timeout_seconds``, kills the process group and raises AssertionError.
        """
        try:
            status = self.process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"still running after {timeout_seconds} s:\n{self.read_out()}\n"
                f"{self._err.read_text()}"
            ) from None
        return Ended(
            status, self._out.read_text(), self._err.read_text(), time.monotonic() - self._began
        )


@functools.cache
def wait_for_fork_server():
    """Wait until the server of forks has imported torch, so that no test's limit counts that."""
    first = ranks.context().Process(target=int, daemon=True)
    first.start()
    first.join()


class ForkedProgram:
    """A process forked from the server, with the part of subprocess.Popen that ``Started`` uses."""

    def __init__(self, command, cwd, env, out, err, *, stdin=os.devnull):
        words = list(command[1:])
        module = words[0] == "-m"
        target, *arguments = words[module:]
        program = PythonProgram(target, tuple(arguments), module=module)
        self._process = ranks.context().Process(
            target=_become, daemon=True, args=(program, str(cwd), dict(env), stdin, out, err)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Return the exit status (negative for a signal), or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """Wait for the end and return the exit status.

        Raises subprocess.TimeoutExpired after ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self._process.exitcode

    def send_signal(self, number):
        """Send the process a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(program, cwd, env, stdin, out, err):
    """Turn this fork into the program, with its own session, streams, folder and environment."""
    import multiprocessing

    os.setsid()
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes itself
    for path, number in ((stdin, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({"OMP_NUM_THREADS": str(os.cpu_count())} | env)
    reset_forked_state(os.environ, Path(cwd) if program.module else Path(program.target))
    if "OMP_NUM_THREADS" not in env:
        del os.environ["OMP_NUM_THREADS"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program.run()


def write_program(path, code):
    """Write a program that runs Python code, and return its path.

    The interpreter's path may have a blank, which a first line with it alone could not have: the
    shell reads the second line as a command, and Python as a string.
    """
    start = f"'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''"
    path.write_text(f"#!/bin/sh\n{start}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def user_environment(**more):
    """Return this process's environment without torchrun's variables, plus ``more``."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {key: value for key, value in os.environ.items() if key not in launchers} | more


def start_part(part, *arguments, cwd, env=None, cold=False):
    """Start ``PartX/main.py`` with these arguments from the folder ``cwd``."""
    command = [sys.executable, str(ROOT / part / "main.py"), *map(str, arguments)]
    return Started(command, cwd=cwd, env=user_environment(**(env or {})), forked=not cold)


def start_lab(*arguments, cwd=ROOT, env=None, cold=False):
    """Start ``python -m lab`` with these arguments."""
    command = [sys.executable, "-m", "lab", *map(str, arguments)]
    return Started(command, cwd=cwd, env=user_environment(**(env or {})), forked=not cold)


def start_ranks(part, size, *arguments, cwd, port=None, env=None, cold=False):
    """Start ``size`` ranks of a part on loopback as the assignment does, with one thread each."""
    port = port or free_port()
    place = ("--master-ip", "127.0.0.1", "--master-port", port, "--num-nodes", size, "--threads", 1)
    return [
        start_part(part, *arguments, *place, "--rank", rank, cwd=cwd, env=env, cold=cold)
        for rank in range(size)
    ]


def run_part(part, *arguments, cwd, ranks=0, timeout_seconds=120, env=None, cold=False):
    """Run a part to its end and return one result per process.

    ``ranks`` : number of ranks; 0 starts one process without flags for a process group.
    """
    way = {"cwd": cwd, "env": env, "cold": cold}
    if ranks:
        started = start_ranks(part, ranks, *arguments, **way)
    else:
        started = [start_part(part, *arguments, **way)]
    return [one.end(timeout_seconds=timeout_seconds) for one in started]


def only_run_folder(output_dir, way):
    """Return the folder of the only run under ``output_dir/way``."""
    [folder] = (output_dir / way).iterdir()
    return folder
