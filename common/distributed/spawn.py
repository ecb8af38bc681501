"""One process for each rank on this machine: ``run_local_ranks`` starts them and waits for them.

No torch here. The caller chooses what a rank runs: a part's command line, or a worker of
``launch_distributed_training``. ``launch_local_ranks`` does it for ``--distributed``: it passes
signals on to the ranks, which print to this process's own terminal, and reports how they ended.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import STDOUT, Popen
from types import FrameType
from typing import IO

from common.errors import INTERRUPTED, TO_BE_CONTINUED, print_to_stderr
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.processes import how_ended, kill_group, on_signals, shell_status, start_child
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
    if ranks == 1:
        return [[sys.executable, *command]]
    group = ["--master-ip", "127.0.0.1", "--master-port", str(port), "--num-nodes", str(ranks)]
    return [[sys.executable, *command, *group, "--rank", str(rank)] for rank in range(ranks)]


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
    outputs = outputs or [None] * len(commands)
    several = len(commands) > 1
    token = {RUN_TOKEN: with_run_token(environments[0])[RUN_TOKEN]} if several else {}
    ranks = _Ranks(deadline=time.monotonic() + limit_seconds)
    try:
        with batch_scheduling(len(commands) > usable_cores()):
            for rank, command in enumerate(commands):
                ranks.start(command, {**environments[rank], **token}, outputs[rank])
        all_ended = ranks.wait(stop_signal, stop_seconds or grace_seconds, grace_seconds)
    finally:
        ranks.kill()
    statuses = tuple(process.returncode for process in ranks.processes)
    timed_out = not all_ended and not ranks.failed and not ranks.stopping
    return RankExits(statuses, tuple(ranks.failed), timed_out)


@dataclass
class _Ranks:
    """The processes of the ranks, and until when they may run.

    failed : the ranks that failed, in the order in which they ended.
    stopping : they have been told to stop.
    """

    deadline: float
    processes: list[Popen] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    stopping: bool = False

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
    ) -> None:
        self.processes.append(
            start_child(command, stdout=output, stderr=output and STDOUT, env=environment)
        )

    def wait(
        self, stop_signal: Callable[[], int | None], stop_seconds: float, grace_seconds: float
    ) -> bool:
        """Wait until all have ended or their time is over; return whether all have ended."""
        while not self._have_ended():
            if not self.stopping and (number := stop_signal()) is not None:
                self._pass_on(number)
                self._allow(stop_seconds)
            if self.failed and not self.stopping:
                self._allow(grace_seconds)
            if time.monotonic() > self.deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _have_ended(self) -> bool:
        """Note which ranks have failed by now; return whether all have ended."""
        statuses = [process.poll() for process in self.processes]
        for rank, status in enumerate(statuses):
            if status and rank not in self.failed:
                self.failed.append(rank)
        return None not in statuses

    def _pass_on(self, number: int) -> None:
        """Send the signal to all of them: they are to save and end."""
        self.stopping = True
        for process in self.processes:
            process.send_signal(number)

    def _allow(self, seconds: float) -> None:
        """Let them run for at most ``seconds`` from now; asking again does not prolong it."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def kill(self) -> None:
        """Kill every process that still runs, with its process group, and wait for it."""
        for process in self.processes:
            kill_group(process)
        for process in self.processes:
            process.wait()


def launch_local_ranks(
    command: Sequence[str], variables: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> int:
    """Run ``python command`` once for each of ``variables``; return the exit status.

    That is 0, the status of the rank that failed first, 75 if the ranks stopped after saving, or
    128 + n after signal n. The first signal is passed on to the ranks, which have 120 s to save and
    end; the second one kills them.
    """
    received: signal.Signals | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if received is not None:
            raise KeyboardInterrupt
        received = signal.Signals(number)

    try:
        with on_signals(_SIGNALS, handle):
            exits = run_local_ranks(
                [[sys.executable, "-u", *command]] * len(variables),
                environments=[{**environment, **of_rank} for of_rank in variables],
                stop_signal=lambda: received,
                stop_seconds=_SAVE_SECONDS,
            )
    except KeyboardInterrupt:
        print_to_stderr("interrupted: a second signal killed the ranks")
        return INTERRUPTED
    return _status(exits, received)


def _status(exits: RankExits, received: signal.Signals | None) -> int:
    if set(exits.statuses) <= {0, TO_BE_CONTINUED}:
        return max(exits.statuses)
    if received is not None:
        return 128 + received
    rank = exits.failed[0]
    status = exits.statuses[rank]
    print_to_stderr(f"rank {rank} failed first: it {how_ended(status)}; its message is above")
    return shell_status(status)
