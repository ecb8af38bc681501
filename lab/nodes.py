"""One command on several nodes of this machine: every process ends, whatever happens, and what failed first is told.

``run_nodes`` starts a process a node, waits, and returns None or the message of the first that failed.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.rendezvous import free_port

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 8.0
_DIE_WITH_PARENT = 1


def run_nodes(command: Sequence[str], nodes: int, *, logs: Path, limit_seconds: float) -> str | None:
    """Run ``python command`` on ``nodes`` processes over loopback, the output of each in ``logs``-rank<r>.txt.

    Returns None where all ended well, else what the first one that failed said. Ctrl-C, a failure and ``limit_seconds`` end
    all of them; so does the end of this process, on Linux also where it was killed.
    """
    place = ["--master-ip", "127.0.0.1", "--master-port", str(free_port()), "--num-nodes", str(nodes)]
    logs.parent.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen] = []
    outputs = [logs.with_name(f"{logs.name}-rank{rank}.txt") for rank in range(nodes)]
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                processes.append(subprocess.Popen(
                    [sys.executable, *command, *([*place, "--rank", str(rank)] if nodes > 1 else [])], stdout=file,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_death_wish()))
        return _wait(processes, outputs, limit_seconds)
    finally:
        end(processes)


def _wait(processes: list[subprocess.Popen], outputs: list[Path], limit_seconds: float) -> str | None:
    deadline = time.monotonic() + limit_seconds
    first: int | None = None
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed and first is None:
            first, deadline = failed[0], min(deadline, time.monotonic() + _GRACE_SECONDS)  # the others will say why, too
        if time.monotonic() > deadline:
            return _message(processes, outputs, first) if first is not None else f"not done within {limit_seconds:g} s"
        time.sleep(_POLL_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    return _message(processes, outputs, first if first is not None else failed[0]) if failed else None


def _message(processes: list[subprocess.Popen], outputs: list[Path], first: int) -> str:
    """The cause rather than an echo: of those that failed, one that says an error of its own, else the first."""
    failed = [first, *(rank for rank, process in enumerate(processes) if process.poll() and rank != first)]
    texts = {rank: _last_words(outputs[rank]) for rank in failed}
    rank = next((rank for rank in failed if texts[rank] and "another rank has ended" not in texts[rank]), first)
    status = processes[rank].returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"rank {rank} {how}: {texts[rank] or 'it said nothing'} (its output: {outputs[rank]})"


def _last_words(output: Path) -> str:
    """The line that tells the error: ours, a traceback's last, else the last one."""
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"error|\w*(Error|Exception)\b", line)]
    return (told or lines or [""])[-1][:500]


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill the processes that still run, with all that they started, and wait for them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _death_wish() -> Callable[[], None] | None:
    """What a child calls before its program, to be killed when this process ends, however that happens (Linux)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
