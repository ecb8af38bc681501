"""Processes and threads: how a rank ends, what happens to its children, and which failed first."""

import atexit
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NoReturn, TypeVar

import psutil

from common.utils.system import libc_function

T = TypeVar("T")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
_CONSEQUENCE = re.compile(r"another rank has ended|rank \d+ .*ended or was killed at")


def end_process(status: int) -> NoReturn:
    """Run the exit handlers and end at once, without shutting the interpreter down.

    torch's threads may still talk to other ranks. They can crash while the interpreter shuts down
    ("terminate called without an active exception"), which would make a good run look failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class DaemonThreads:
    """``count`` daemon threads that start actions in the order of ``submit``.

    They end after the last action, once nothing refers to the object. ThreadPoolExecutor's threads
    would keep the process alive until then, forever if one waits for a rank that has ended.
    """

    def __init__(self, count: int) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=_run_actions, args=(self._actions,), daemon=True).start()

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Return the future of ``action``."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(action())
            except BaseException as error:
                outcome.set_exception(error)

        self._actions.put(run)
        return outcome

    def __del__(self) -> None:
        for _ in range(self._count):
            self._actions.put(None)


def _run_actions(actions: "SimpleQueue[Callable[[], None] | None]") -> None:
    while run := actions.get():
        run()
        del run  # with all that the action refers to


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Start ``action`` in a daemon thread and return its future."""
    return DaemonThreads(1).submit(action)


def kill_on_parent_exit() -> Callable[[], object] | None:
    """Return a ``preexec_fn`` by which the kernel kills a child with its parent; None off Linux."""
    prctl = libc_function("prctl")  # looked up before the fork: the child must only call it
    return None if prctl is None else lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphans children of this process, so that ``descendants`` finds them; on Linux."""
    if prctl := libc_function("prctl"):
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on; none if it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def shell_status(status: int) -> int:
    """Return an exit status as a shell reports it: 128 + n if signal n ended the process (-n)."""
    return status if status >= 0 else 128 - status


def find_root_failure(
    failed: Sequence[int], statuses: Mapping[int, int], outputs: Mapping[int, str], *, name: str
) -> tuple[int, str]:
    """Return the rank or node that caused the failure of the others, and a message about it.

    Parameters
    ----------
    failed : ranks or nodes in the order in which they ended.
    statuses, outputs : of each rank or node; a negative status is a signal's number.
    name : "rank" or "node".
    """
    errors = {one: last_error_line(outputs[one]) for one in failed}
    causes = (one for one in failed if errors[one] and not _CONSEQUENCE.search(errors[one]))
    culprit = next(causes, failed[0])
    how = f"ended with status {statuses[culprit]}"
    if statuses[culprit] < 0:
        how = f"was killed by {_signal_name(-statuses[culprit])}"
    return culprit, f"{name} {culprit} {how}: {errors[culprit] or 'it printed nothing'}"


def _signal_name(number: int) -> str:
    """Return e.g. "SIGKILL"; real-time signals have no name, nor have the numbers in a bad file."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def last_error_line(output: str) -> str:
    """Return the line that names the error, else the last line.

    The error is this project's own message, or a traceback's last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error|\w*(Error|Exception)\b", line)]
    # Whole words only: a path in the line can be copied.
    return textwrap.shorten((errors or lines or [""])[-1], 500, placeholder=" …")
