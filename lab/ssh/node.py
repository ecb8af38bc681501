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
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.utils.network import is_loopback, own_addresses, resolve, why_unreached
from common.utils.processes import adopt_orphans, start_child
from common.utils.source_hash import code_facts
from lab.fleet.supervision import kill_descendants, supervise

READY = b"lab.ssh is ready\n"
RESULT = b"lab.ssh returns "
_NOT_FOUND = 127
_CONNECT_SECONDS = 4.0
_LISTEN_SECONDS = 60  # a test of connections lasts no longer
_MOST_GUESTS = 1024  # connections that wait at the port


@dataclass(frozen=True)
class HostFacts:
    """A host and its checkout.

    script_there : whether the command's file is in it. code : see ``code_facts``.
    """

    folder: str
    script_there: bool
    python: str
    code: dict[str, str]
    name: str
    addresses: list[str]
    clock: float


def facts(script: str | None) -> dict[str, Any]:
    """Return ``HostFacts`` as plain values. script : the command's file in the checkout."""
    found = HostFacts(
        folder=os.getcwd(),
        script_there=script is None or os.path.isfile(script),
        python=sys.executable,
        code={"Python": ".".join(map(str, sys.version_info[:2])), **code_facts()},
        name=socket.gethostname(),
        addresses=sorted(filter(_is_ipv4, own_addresses())),
        clock=time.time(),
    )
    return asdict(found)


def run(command: Sequence[str], environment: Mapping[str, str], silence_seconds: float) -> int:
    """Run a command until it ends or stdin does; return its exit status, or -signal.

    Without a sign of life for ``silence_seconds`` SIGALRM ends this process, see ``main``.

    environment : variables for the command; the host's own values win.
    """
    adopt_orphans()
    path = os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()])
    try:
        variables = {**environment, **os.environ, "PATH": path}
        child = start_child(command, env=variables, stderr=subprocess.STDOUT)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", flush=True)
        return _NOT_FOUND
    count_silence = partial(signal.setitimer, signal.ITIMER_REAL, silence_seconds)
    count_silence()
    return supervise(child.pid, control=0, heard=count_silence)


def listen(port: int) -> None:
    """Let others connect to the port, until the terminal leaves or asks for the end.

    After ``_LISTEN_SECONDS`` SIGALRM ends this process, see ``main``. Nothing is accepted or read:
    guests that connect and stay delay nobody.
    """
    signal.alarm(_LISTEN_SECONDS)  # if the terminal is lost without a word
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
    addresses = [address for address in found if _is_ipv4(address) and not is_loopback(address)]

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
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as archive:
        for run_folder in sorted(root.glob("[!.]*/[!.]*")):
            if _is_wanted(run_folder, names, since):
                for path in sorted(run_folder.rglob("*")):
                    if _is_sent(path.relative_to(run_folder), checkpoints):
                        _add_file(archive, path, root)


def _is_wanted(run_folder: Path, names: Sequence[str], since: float) -> bool:
    """Return whether a run is named; without names, whether it has logged anything since then."""
    logs = [*run_folder.glob("config.json*"), *run_folder.glob("logs_rank*")]
    if not logs:
        return False
    if not names:
        return any(path.stat().st_mtime >= since for path in logs)
    experiment = run_folder.parent.name
    return experiment in names or f"{experiment}/{run_folder.name}" in names


def _is_sent(path: Path, checkpoints: bool) -> bool:
    """Return whether a run's file, by its path in the run, is sent: a hidden one is unfinished."""
    if any(part.startswith(".") for part in path.parts):
        return False
    return checkpoints or path.parts[0] != "checkpoints"


def _add_file(archive: tarfile.TarFile, path: Path, root: Path) -> None:
    """Add a regular file, by its name below ``root``."""
    if path.is_symlink() or not path.is_file():
        return
    name = path.relative_to(root).as_posix()
    # The open file stays whole if the run replaces or deletes it meanwhile.
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        archive.addfile(archive.gettarinfo(arcname=name, fileobj=file), file)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "facts": facts,
    "run": run,
    "listen": listen,
    "connect": connect,
    "send_runs": send_runs,
}


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
