"""End everything that a run of a script has started, whatever the script does against it."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

TEMPORARY = "lab-audit-"
"""Begins the name of a folder that is removed at the end."""
_POLL_SECONDS = 0.05
_ROUNDS = 100


def processes_of(folder: Path, pids: Iterable[int]) -> dict[int, psutil.Process]:
    """Return what runs of a run: ``pids``, their descendants, and whoever inherited its settings.

    The settings name ``folder``. They show also processes that have left their parent and session.
    """
    found: dict[int, psutil.Process] = {}
    for process in [*map(_process, pids), *_with_settings(folder)]:
        if process is None or process.pid in found or process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            for one in [process, *process.children(recursive=True)]:
                if one.status() != psutil.STATUS_ZOMBIE:
                    found[one.pid] = one
    return found


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _with_settings(folder: Path) -> list[psutil.Process]:
    """Return the processes whose environment names the folder, or one in it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
            settings = json.loads(process.environ()["LAB_AUDIT"])
            if Path(settings["folder"]).is_relative_to(folder):
                found.append(process)
    return found


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
