"""Processes and threads: how children start and end, their signals, and what they leave.

``start_child`` starts a child of ours, ``wait_for_ranks`` waits for several, wherever they run,
``kill_group`` ends one, and ``how_ended`` says how it ended.
"""

import atexit
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import psutil

from common.errors import TO_BE_CONTINUED
from common.utils.system import libc_function

T = TypeVar("T")
INTERRUPT = threading.Event()
"""Set by Ctrl-C, also while the main thread is in a collective, where Python sees no signal."""
GRACE_SECONDS = 8.0
"""For ranks to end after Ctrl-C, or to report why they fail after another one has failed."""
SAVE_SECONDS = 120.0
"""For ranks to save and end after another signal, or after another rank has done so."""
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


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
        self._jobs: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_run_jobs, args=(self._jobs,), daemon=True).start()

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Return the future of ``action``."""
        outcome: Future[T] = Future()
        self._jobs.put((outcome, action))
        return outcome

    def __del__(self) -> None:
        self._jobs.put(None)


def _run_jobs(jobs: "SimpleQueue[tuple[Future, Callable[[], Any]] | None]") -> None:
    while job := jobs.get():
        outcome, action = job
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)
        del job, outcome, action  # with all that the action refers to
    jobs.put(None)  # for the other threads


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Start ``action`` in a daemon thread and return its future."""
    return DaemonThreads(1).submit(action)


@contextlib.contextmanager
def on_signals(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Call ``handler`` with the number and frame of these signals, while the context lasts."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a command in a session of its own, without input unless ``options`` give some.

    Ctrl-C at the terminal does not reach it; on Linux it is killed if this process is killed.

    options : of ``subprocess.Popen``. Raises OSError if the command cannot be started.
    """
    own = {"stdin": subprocess.DEVNULL, "preexec_fn": kill_on_parent_exit()}
    return subprocess.Popen(command, start_new_session=True, **(own | options))


def kill_group(child: subprocess.Popen) -> None:
    """Kill a child of ``start_child`` that still runs, with its process group."""
    with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def wait_for_ranks(
    statuses: Callable[[], Sequence[int | None]],
    *,
    limit_seconds: float = math.inf,
    grace_seconds: float = GRACE_SECONDS,
    save_seconds: float = SAVE_SECONDS,
    received: Callable[[], Sequence[int]] = lambda: (),
    pass_on: Callable[[int], object] = lambda number: None,
    poll_seconds: float = 0.05,
) -> list[int]:
    """Wait until all ranks have ended, or those that still run have to be ended.

    They have ``grace_seconds`` after the first failure, and ``save_seconds`` if the ranks that
    ended have saved. A second signal ends the wait at once.

    Parameters
    ----------
    statuses : returns the ranks' exit statuses, None for one that runs; called each
        ``poll_seconds``. May raise.
    received : returns the signals that have come so far.
    pass_on : sends the first of them to the ranks, which then have ``grace_seconds`` after SIGINT
        and ``save_seconds`` after any other one.

    Returns the ranks that ended with another status than 0, in the order in which they ended.
    """
    deadline = time.monotonic() + limit_seconds
    failed: dict[int, int] = {}  # statuses by rank, the first failure first
    passed_on = False
    while True:
        found = statuses()
        for rank, status in enumerate(found):
            if status:
                failed.setdefault(rank, status)
        if None not in found:
            return list(failed)
        signals = received()
        if signals and not passed_on:
            passed_on = True
            pass_on(signals[0])
        left = _seconds_left(signals, failed.values(), grace_seconds, save_seconds)
        # The next round adds the same seconds to a later time, so it changes nothing.
        deadline = min(deadline, time.monotonic() + left)
        if len(signals) > 1 or time.monotonic() > deadline:
            return list(failed)
        time.sleep(poll_seconds)


def _seconds_left(
    signals: Sequence[int], failures: Collection[int], grace_seconds: float, save_seconds: float
) -> float:
    """Return how long ranks may still run after these signals, and these statuses of others."""
    if signals:
        may_save = signals[0] != signal.SIGINT
    elif failures:
        may_save = set(failures) == {TO_BE_CONTINUED}
    else:
        return math.inf
    return save_seconds if may_save else grace_seconds


def how_ended(status: int) -> str:
    """Return how a process ended: "ended with status 1", "was killed by SIGKILL".

    status : as ``Popen.returncode``: negative for a signal. It does not say why: SIGKILL comes from
        a kernel without memory, and from anybody else.
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name, nor has a number in a bad file
        return f"was killed by signal {-status}"


def kill_on_parent_exit() -> Callable[[], object] | None:
    """Return a ``preexec_fn`` by which the kernel kills a child with its parent; None off Linux."""
    prctl = libc_function("prctl")  # looked up before the fork: the child must only call it
    if prctl is None:
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    return 128 - status if status < 0 else status
