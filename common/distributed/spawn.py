"""One process for each rank on this machine: ``run_local_ranks`` starts them and waits for them.

No torch here. The caller chooses what a rank runs: a part's command line, or a worker of
``launch_distributed_training``. ``launch_local_ranks`` does it for ``--distributed``: it passes
signals on to the ranks, which print to this process's own terminal, and reports how they ended.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from common.errors import INTERRUPTED, TO_BE_CONTINUED, print_to_stderr
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.processes import kill_on_parent_exit, on_signals, shell_status
from common.utils.system import batch_scheduling, usable_cores

_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAVE_SECONDS = 120.0


@dataclass(frozen=True)
class RankExits:
    """How the ranks of ``run_local_ranks`` ended.

    statuses : by rank, as ``Popen.returncode``: negative for a signal.
    failed : the ranks that failed by themselves, in the order in which they ended.
    timed_out : the limit passed before any rank failed.
    """

    statuses: tuple[int, ...]
    failed: tuple[int, ...]
    timed_out: bool


def rank_commands(command: Sequence[str], ranks: int, *, port: int) -> list[list[str]]:
    """Return what starts each rank of ``python command`` here; they meet over loopback at ``port``.

    A single rank needs no group.
    """
    group = ["--master-ip", "127.0.0.1", "--master-port", str(port), "--num-nodes", str(ranks)]
    return [
        [sys.executable, *command, *([*group, "--rank", str(rank)] if ranks > 1 else [])]
        for rank in range(ranks)
    ]


def run_local_ranks(
    commands: Sequence[Sequence[str]],
    *,
    outputs: Sequence[IO[bytes] | None] = (),
    environments: Sequence[Mapping[str, str]] = (),
    limit_seconds: float = math.inf,
    grace_seconds: float = 8.0,
    stop_signal: Callable[[], int | None] = lambda: None,
    stop_seconds: float | None = None,
) -> RankExits:
    """Run ``commands[rank]`` for every rank and return how they ended, once no process is left.

    After the first failure the other ranks have ``grace_seconds`` to report why they fail, too.
    After ``limit_seconds`` or an exception (Ctrl-C), all are killed together with every process
    that they started. On Linux the ranks are also killed if this process is killed. Several ranks
    get the run's token, a new one unless the environment has one.

    Parameters
    ----------
    outputs : a file for each rank's stdout and stderr; None, or no files: this process's own.
    environments : of each rank; none: this process's own.
    stop_signal : asked every 0.05 s. Once it returns a signal, the ranks receive it and have
        ``stop_seconds`` (default: ``grace_seconds``) to save and end.
    """
    environments = environments or [os.environ] * len(commands)
    token = {} if len(commands) == 1 else {RUN_TOKEN: with_run_token(environments[0])[RUN_TOKEN]}
    processes: list[subprocess.Popen] = []
    failed: list[int] = []
    deadline, stopping = time.monotonic() + limit_seconds, False
    try:
        with batch_scheduling(len(commands) > usable_cores()):
            for rank, command in enumerate(commands):
                output = outputs[rank] if outputs else None
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output and subprocess.STDOUT,
                        env={**environments[rank], **token},
                        start_new_session=True,
                        preexec_fn=kill_on_parent_exit(),
                    )
                )
        while True:
            statuses = [process.poll() for process in processes]
            ended = [rank for rank, status in enumerate(statuses) if status and rank not in failed]
            if not stopping and (number := stop_signal()) is not None:
                stopping = True
                for process in processes:
                    process.send_signal(number)
                deadline = min(deadline, time.monotonic() + (stop_seconds or grace_seconds))
            if ended and not failed and not stopping:
                deadline = min(deadline, time.monotonic() + grace_seconds)
            failed += ended
            if None not in statuses or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        _kill(processes)
    timed_out = None in statuses and not failed and not stopping
    return RankExits(tuple(process.returncode for process in processes), tuple(failed), timed_out)


def _kill(processes: Sequence[subprocess.Popen]) -> None:
    """Kill every process that still runs, with its process group, and wait for it."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def launch_local_ranks(
    command: Sequence[str], variables: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> int:
    """Run ``python command`` once for each of ``variables``; return the exit status.

    That is 0, the status of the rank that failed first, 75 if the ranks stopped after saving, or
    128 + n after signal n. The first signal is passed on to the ranks, which have 120 s to save and
    end; the second one kills them.
    """
    received: list[signal.Signals] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    try:
        with on_signals(_SIGNALS, handle):
            exits = run_local_ranks(
                [[sys.executable, "-u", *command]] * len(variables),
                environments=[{**environment, **one} for one in variables],
                stop_signal=lambda: received[0] if received else None,
                stop_seconds=_SAVE_SECONDS,
            )
    except KeyboardInterrupt:
        print_to_stderr("interrupted: a second signal killed the ranks")
        return INTERRUPTED
    return _status(exits, received[0] if received else None)


def _status(exits: RankExits, received: signal.Signals | None) -> int:
    if set(exits.statuses) <= {0, TO_BE_CONTINUED}:
        return max(exits.statuses)
    if received is not None:
        return 128 + received
    rank = exits.failed[0]
    status = exits.statuses[rank]
    how = f"with status {status}" if status > 0 else f"by signal {-status}"
    print_to_stderr(f"rank {rank} ended first, {how}; its message is above")
    return shell_status(status)
