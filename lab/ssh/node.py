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
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common.utils.network import is_loopback, own_addresses, resolve, why_unreached
from common.utils.processes import adopt_orphans, kill_on_parent_exit
from common.utils.source_hash import code_facts
from lab.processes.supervision import kill_descendants, supervise

READY = b"lab.ssh is ready\n"
RESULT = b"lab.ssh returns "
_NOT_FOUND = 127
_CONNECT_SECONDS = 4.0
_LISTEN_SECONDS = 60
_MOST_GUESTS = 1024


def facts(script: str | None) -> dict[str, Any]:
    """Return facts about this host and its checkout. script : the command's file in it."""
    return {
        "folder": os.getcwd(),
        "script_there": script is None or os.path.isfile(script),
        "python": sys.executable,
        "code": {"Python": ".".join(map(str, sys.version_info[:2])), **code_facts()},
        "name": socket.gethostname(),
        "addresses": sorted(filter(_is_ipv4, own_addresses())),
        "clock": time.time(),
    }


def run(command: Sequence[str], environment: Mapping[str, str], silence_seconds: float) -> int:
    """Run a command until it ends or stdin does; return its exit status, or -signal.

    Without a sign of life for ``silence_seconds`` SIGALRM ends this process, see ``main``.

    environment : variables for the command; the host's own values win.
    """
    adopt_orphans()
    path = os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()])
    try:
        child = subprocess.Popen(
            command,
            env={**environment, **os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=kill_on_parent_exit(),
        )
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", flush=True)
        return _NOT_FOUND
    count_silence = partial(signal.setitimer, signal.ITIMER_REAL, silence_seconds)
    count_silence()
    return supervise(child.pid, control=0, heard=count_silence)


def listen(port: int) -> None:
    """Let others connect to the port, until the terminal leaves or asks for the end.

    Nothing is accepted or read: guests that connect and stay delay nobody.
    """
    signal.alarm(_LISTEN_SECONDS)
    with socket.create_server(("", port), backlog=_MOST_GUESTS):
        print("listening", flush=True)
        while os.read(0, 1) == b"\0":  # a sign of life
            pass


def _is_ipv4(address: str) -> bool:
    return ":" not in address


def connect(names: Sequence[str], port: int) -> dict[str, str]:
    """Return why a host cannot be reached at each address that its names have here; "" if it can.

    names : may be addresses.
    """
    found = [address for name in names for address in sorted(resolve(name))]
    addresses = [one for one in found if _is_ipv4(one) and not is_loopback(one)]

    def why_not(address: str) -> str:
        try:
            with socket.create_connection((address, port), _CONNECT_SECONDS):
                return ""
        except OSError as error:
            return why_unreached(error)

    with ThreadPoolExecutor() as pool:
        return dict(zip(addresses, pool.map(why_not, addresses), strict=True))


def send_runs(
    folder: str, reports: str, names: Sequence[str], since: float, checkpoints: bool
) -> None:
    """Write the files of runs to stdout, as a tar archive of <experiment>/<run>/<file>.

    names : of runs or experiments; none: the runs that have logged anything after ``since``, a time
    of this host's own clock.
    """
    root = Path.home() / folder / reports
    left_out = re.compile(r"/\." if checkpoints else r"/\.|^[^/]*/[^/]*/checkpoints/")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as archive:
        for run_folder in sorted(root.glob("[!.]*/[!.]*")):
            own_names = {run_folder.parent.name, f"{run_folder.parent.name}/{run_folder.name}"}
            logs = [*run_folder.glob("config.json*"), *run_folder.glob("logs_rank*")]
            recent = any(path.stat().st_mtime >= since for path in logs)
            if logs and (own_names & {*names} if names else recent):
                for path in sorted(run_folder.rglob("*")):
                    name = path.relative_to(root).as_posix()
                    # A hidden file is unfinished.
                    if path.is_file() and not path.is_symlink() and not left_out.search(name):
                        # The open file stays whole if the run replaces or deletes it meanwhile.
                        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                            archive.addfile(archive.gettarinfo(arcname=name, fileobj=file), file)


_FUNCTIONS = {one.__name__: one for one in (facts, run, listen, connect, send_runs)}


def main() -> None:
    """Serve the request on stdin, and leave no process behind."""
    request = json.loads(io.FileIO(0, closefd=False).readline())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(1))
    os.write(1, b"\n" + READY)  # after a line that the login shell may have begun
    try:
        result = _FUNCTIONS[request.pop("do")](**request)
    except OSError as error:
        sys.exit(os.strerror(error.errno or 0).lower())
    finally:
        kill_descendants()
    sys.stdout.flush()
    os.write(2, b"\n%b%b\n" % (RESULT, json.dumps(result).encode()))
