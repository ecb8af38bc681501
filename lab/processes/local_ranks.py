"""Run one command on several ranks of this machine; end every process, whatever happens, and report the first failure.

``run_nodes`` starts a process a rank, waits, and returns None or the message of the first that failed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.utils.processes import find_root_failure, kill_on_parent_exit
from common.utils.system import free_port

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 8.0


def run_nodes(
    command: Sequence[str], nodes: int, *, logs: Path, limit_seconds: float
) -> str | None:
    """Run ``python command`` on ``nodes`` processes over loopback, the output of each in ``logs``-rank<r>.txt.

    Returns None where all ended well, else the error of the one that failed first. Ctrl-C, a failure and ``limit_seconds`` end
    all of them; so does the end of this process, on Linux also where it was killed.
    """
    address = ["--master-ip", "127.0.0.1", "--master-port", str(free_port())]
    logs.parent.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen] = []
    outputs = [logs.with_name(f"{logs.name}-rank{rank}.txt") for rank in range(nodes)]
    try:
        for rank, output in enumerate(outputs):
            group = [*address, "--num-nodes", str(nodes), "--rank", str(rank)] if nodes > 1 else []
            with output.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command, *group],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        preexec_fn=kill_on_parent_exit(),
                    )
                )
        return _wait(processes, outputs, limit_seconds)
    finally:
        end(processes)


def _wait(
    processes: list[subprocess.Popen], outputs: list[Path], limit_seconds: float
) -> str | None:
    deadline = time.monotonic() + limit_seconds
    first: int | None = None
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed and first is None:
            first = failed[0]
            # The others report why they fail, too.
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            if first is None:
                return f"not done within {limit_seconds:g} s"
            return _message(processes, outputs, first)
        time.sleep(_POLL_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return None
    return _message(processes, outputs, first if first is not None else failed[0])


def _message(processes: list[subprocess.Popen], outputs: list[Path], first: int) -> str:
    others = [rank for rank, process in enumerate(processes) if process.poll() and rank != first]
    failed = [first, *others]
    statuses = {rank: processes[rank].returncode for rank in failed}
    texts = {rank: outputs[rank].read_text(encoding="utf-8", errors="replace") for rank in failed}
    culprit, message = find_root_failure(failed, statuses, texts, name="rank")
    return f"{message} (its output: {outputs[culprit]})"


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill the processes that still run, with all that they started, and wait for them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
