"""An audit leaves neither a folder nor a process behind, whatever the script does."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from common.utils.paths import REPOSITORY

TEMPORARY = "lab-audit-"
"""Begins the name of a folder that is removed at the end."""
_GUARD_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lab.audit.leftovers import guard; guard(sys.argv[2])"
)
_POLL_SECONDS = 0.05
_ROUNDS = 100


@contextlib.contextmanager
def record_folder(keep: Path | None) -> Iterator[Path]:
    """Make a folder for the records; at the end, or if this process is killed, leave nothing.

    A guard process waits for the end of this one: it ends what a script has left running.
    keep : a folder that stays.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if keep is None else keep.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    guard = subprocess.Popen(
        [sys.executable, "-P", "-c", _GUARD_CODE, str(REPOSITORY), str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guard.communicate()  # closes its stdin


@contextlib.contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it leaves nothing behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def processes_of(folder: Path, pids: Iterable[int]) -> dict[int, psutil.Process]:
    """Return what runs of a run: ``pids``, their descendants, and whoever inherited its settings.

    The settings name ``folder``. They show also processes that have left their parent and session.
    """
    wanted = set(pids)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in wanted or _has_settings(process, folder):
                for one in [process, *process.children(recursive=True)]:
                    if one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE:
                        found[one.pid] = one
    return found


def _has_settings(process: psutil.Process, folder: Path) -> bool:
    """Return whether the environment of a process names the folder, or one in it."""
    with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
        settings = json.loads(process.environ()["LAB_AUDIT"])
        return Path(settings["folder"]).is_relative_to(folder)
    return False


def work_done(processes: Iterable[psutil.Process]) -> float:
    """Return the seconds that processes have computed, and 0.1 s for each MB written to files."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error, AttributeError):  # macOS does not count bytes
            times = process.cpu_times()
            seconds += times.user + times.system
            seconds += process.io_counters().write_chars / 1e7
    return seconds


def end_processes(
    folder: Path, pids: Iterable[int], *, grace_seconds: float, reap: Callable[[], object]
) -> None:
    """Send SIGTERM to all processes of a run, and SIGKILL to those left after ``grace_seconds``.

    ``reap`` is called while this waits, so that ended children do not stay zombies.
    """
    pids = list(pids)
    _signal_all(processes_of(folder, pids), signal.SIGTERM)
    limit = time.monotonic() + grace_seconds
    while time.monotonic() < limit:
        reap()
        if not processes_of(folder, pids):
            return
        time.sleep(_POLL_SECONDS)
    for _ in range(_ROUNDS):  # again for those that were started meanwhile
        left = processes_of(folder, pids)
        _signal_all(left, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(_POLL_SECONDS)


def _signal_all(processes: dict[int, psutil.Process], number: int) -> None:
    for process in processes.values():
        with contextlib.suppress(psutil.Error):  # psutil checks that the id is not another's by now
            process.send_signal(number)


def guard(folder: str) -> None:
    """Wait until stdin is closed, then kill what a run has left; called in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    end_processes(Path(folder), [], grace_seconds=0.0, reap=lambda: None)
    if os.path.basename(folder).startswith(TEMPORARY) and os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)
