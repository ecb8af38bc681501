"""Processes: how a rank ends, waiting for what may never answer, children that end with their parent, and which failed first."""

import atexit
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NoReturn, TypeVar

import psutil


def end_process(status: int) -> NoReturn:
    """Do what was registered for the end, and end at once, without taking the interpreter down.

    Threads of torch, which may still talk to other ranks, do not always survive that everything is taken down around them:
    "terminate called without an active exception", and the status would be that of a crash, also after a run that went well.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


T = TypeVar("T")


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Start ``action`` in a thread that keeps no process from ending; return what will hold its result or its error."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # of prctl
_ECHO = "another rank has ended"


def kill_on_parent_exit() -> Callable[[], None] | None:
    """Return what a child calls before its program, to be killed when its parent ends, however that happens; None off Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind, so that ``descendants`` finds it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all that a process has started and they have started; none where it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def find_root_failure(
    failed: Sequence[int], statuses: Mapping[int, int], outputs: Mapping[int, str], *, name: str
) -> tuple[int, str]:
    """Return who failed first and what it said: the cause rather than an echo of it.

    failed : ranks or nodes in the order of their ends. name : what they are called, "rank" or "node".
    """
    words = {one: last_error_line(outputs[one]) for one in failed}
    culprit = next((one for one in failed if words[one] and _ECHO not in words[one]), failed[0])
    status = statuses[culprit]
    how = (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with status {status}"
    )
    return culprit, f"{name} {culprit} {how}: {words[culprit] or 'it said nothing'}"


def last_error_line(output: str) -> str:
    """Return the line that tells the error: ours, a traceback's last, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"error|\w*(Error|Exception)\b", line)]
    return (told or lines or [""])[-1][:500]
