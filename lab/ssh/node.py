"""What runs on a host during ``lab launch`` and ``lab collect``: ``python -m lab.ssh``.

``main`` reads a request, one line of JSON, prints READY, calls the function that the request names,
and writes RESULT and what the function returns to stderr. Stdout belongs to the function: the
output of a command, or files. During ``run`` and ``listen`` each further byte of stdin is a signal
for the command, or 0, a sign of life. When stdin ends or is silent for too long, everything that
the command has started is killed, in whatever session.
"""

import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from common.utils.processes import adopt_orphans, kill_descendants, kill_on_parent_exit
from common.utils.source_hash import code_facts

READY = b"lab.ssh is ready\n"
RESULT = b"lab.ssh returns "
_NOT_FOUND = 127
_POLL_SECONDS, _CONNECT_SECONDS = 0.1, 4.0
_LISTEN_SECONDS, _MOST_GUESTS = 60, 1024


def facts(script: str | None) -> dict[str, Any]:
    """Return facts about this host and its checkout. script : the command's file in it."""
    interfaces = psutil.net_if_addrs().values()
    addresses = [one.address for some in interfaces for one in some if one.family == socket.AF_INET]
    return {
        "folder": os.getcwd(),
        "script_there": script is None or os.path.isfile(script),
        "python": sys.executable,
        "code": {"Python": ".".join(map(str, sys.version_info[:2])), **code_facts()},
        "name": socket.gethostname(),
        "addresses": sorted(one for one in addresses if not one.startswith("127.")),
        "clock": time.time(),
    }


def run(command: Sequence[str], environment: Mapping[str, str], silence_seconds: float) -> int:
    """Run a command until it ends or the terminal leaves; return its exit status, or -signal.

    environment : variables for the command; the host's own values win.
    """
    adopt_orphans()
    variables = {"PATH": os.defpath, **environment, **os.environ}
    variables["PATH"] = os.path.dirname(sys.executable) + os.pathsep + variables["PATH"]
    try:
        child = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=kill_on_parent_exit(),
        )
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", flush=True)
        return _NOT_FOUND
    heard = time.monotonic()
    while child.poll() is None and time.monotonic() - heard < silence_seconds:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            heard = time.monotonic()
            for number in os.read(0, 256) or [signal.SIGKILL]:  # nothing: the terminal has left
                os.killpg(child.pid, number)
    return -signal.SIGKILL if child.returncode is None else child.returncode


def listen(port: int) -> None:
    """Let others connect to the port, until the terminal leaves or asks for the end.

    Nothing is accepted or read: guests that connect and stay delay nobody.
    """
    signal.alarm(_LISTEN_SECONDS)
    with socket.create_server(("", port), backlog=_MOST_GUESTS):
        print("listening", flush=True)
        while os.read(0, 1) == b"\0":  # a sign of life
            pass


def connect(names: Sequence[str], addresses: Sequence[str], port: int) -> dict[str, str]:
    """Return why a host cannot be reached at each of its addresses; "" if it can.

    The addresses that its names have here are the first.
    """
    tried: dict[str, None] = {}
    for name in names:
        with contextlib.suppress(OSError, UnicodeError):  # the name is unknown here
            found = socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
            tried.update((str(place[0]), None) for *_, place in found)
    tried.update(dict.fromkeys(addresses))

    def why_unreached(address: str) -> str:
        try:
            with socket.create_connection((address, port), _CONNECT_SECONDS):
                return ""
        except OSError as error:
            return (error.strerror or "no answer").lower()

    with ThreadPoolExecutor() as pool:
        reasons = dict(zip(tried, pool.map(why_unreached, tried), strict=True))
    return {one: why for one, why in reasons.items() if not one.startswith("127.")}


def send_runs(
    folder: str, reports: str, names: Sequence[str], since: float, checkpoints: bool
) -> None:
    """Write the files of runs to stdout, as a tar archive of <experiment>/<run>/<file>.

    names : of runs or experiments; none: the runs that changed after ``since``, a time of this
    host's own clock.
    """
    root = Path.home() / folder / reports
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for run_folder in sorted(root.glob("[!.]*/[!.]*")):
            files = _files(run_folder, checkpoints)
            own_names = {run_folder.parent.name, f"{run_folder.parent.name}/{run_folder.name}"}
            wanted = own_names & {*names} if names else max(files.values(), default=0.0) >= since
            if wanted and any(one.name.startswith(("config.json", "logs_rank")) for one in files):
                for path in files:
                    _add(archive, path, path.relative_to(root).as_posix())


def _files(run_folder: Path, checkpoints: bool) -> dict[Path, float]:
    """Return when each file of a run has changed, without hidden files: they are unfinished."""
    left_out = re.compile(r"(^|/)\." if checkpoints else r"(^|/)\.|^checkpoints/")
    found = {}
    for path in run_folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the run has just deleted it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and not left_out.search(
                path.relative_to(run_folder).as_posix()
            ):
                found[path] = status.st_mtime
    return found


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a whole state of a file, which may grow or be replaced at any time."""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


_FUNCTIONS = {one.__name__: one for one in (facts, run, listen, connect, send_runs)}


def main() -> None:
    """Serve the request on stdin, and leave no process behind."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = json.loads(stdin.readline())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    os.write(1, b"\n" + READY)  # after a line that the login shell may have begun
    try:
        result = _FUNCTIONS[request.pop("do")](**request)
    except OSError as error:
        sys.exit(f"error: {error.strerror}")
    finally:
        kill_descendants()
    sys.stdout.flush()
    os.write(2, b"\n%b%b\n" % (RESULT, json.dumps(result).encode()))
