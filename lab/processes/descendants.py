"""End what a supervisor of nodes has started, and all that this has started in turn."""

import contextlib

import psutil


def kill_descendants() -> None:
    """Kill and reap every process that descends from this one; with ``adopt_orphans`` all of them.

    Give up after 10 s: the kernel cannot end what waits for a dead file system.
    """
    for _ in range(100):
        if not (children := psutil.Process().children(recursive=True)):
            return
        for child in children:
            with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
                child.kill()
        psutil.wait_procs(children, timeout=0.1)
