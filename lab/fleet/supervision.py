"""Wait for a command on a node or host, pass signals on to it, and end all that it has started.

The process that runs ``supervise`` is the command's parent. What has started it is elsewhere, and
holds the other end of ``control``: when that ends, the command ends, too.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

import psutil


def supervise(pid: int, control: int, *, heard: Callable[[], object] = lambda: None) -> int:
    """Return a command's exit status, or -signal, when nothing that it started is left.

    Call ``adopt_orphans`` (common/utils/processes.py) before the command starts, else what its own
    children start may escape.

    Parameters
    ----------
    pid : a child of this process, which leads a process group or is about to.
    control : a file descriptor. Each byte from it is a signal for the command's process group, as
        Ctrl-C is at a terminal, or 0, which does nothing. When it is closed, the group is killed.
    heard : called at each byte, in a thread.
    """
    threading.Thread(target=_pass_signals_on, args=[pid, control, heard], daemon=True).start()
    try:
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == pid:  # no adopted orphan
                return os.waitstatus_to_exitcode(status)
    finally:
        kill_descendants()


def _pass_signals_on(group: int, control: int, heard: Callable[[], object]) -> None:
    """Send each byte of ``control`` to the process group as a signal, SIGKILL at its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
    numbers = b"\0"
    while numbers:
        numbers = os.read(control, 256)
        heard()
        for number in numbers or [signal.SIGKILL]:  # no bytes: it is closed
            try:
                os.killpg(group, number)
            except OSError:  # it has ended, or does not lead its group yet
                with contextlib.suppress(OSError):
                    os.kill(group, number)


def kill_descendants(pid: int | None = None) -> None:
    """Kill every process that descends from ``pid``, by default from this one, which reaps them.

    With ``adopt_orphans`` orphans are among them. Give up after 10 s: the kernel cannot end what
    waits for a dead file system.
    """
    for _ in range(100):
        children = psutil.Process(pid).children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
                child.kill()
        psutil.wait_procs(children, timeout=0.1)
