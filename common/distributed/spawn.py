"""One process for each rank on this machine: ``run_local_ranks`` starts them and waits for them.

No torch here. The caller chooses what a rank runs: a part's command line, or a worker of
``launch_distributed_training``. ``launch_local_ranks`` does it for ``--distributed``: it passes
signals on to the ranks, which print to this process's own terminal, and reports how they ended.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from subprocess import STDOUT, Popen
from typing import IO

from common.errors import INTERRUPTED, TO_BE_CONTINUED, print_to_stderr
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.processes import (
    GRACE_SECONDS,
    SAVE_SECONDS,
    how_ended,
    kill_group,
    on_signals,
    shell_status,
    start_child,
    wait_for_ranks,
)
from common.utils.system import batch_scheduling, usable_cores

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class RankExits:
    """How the ranks of ``run_local_ranks`` ended.

    statuses : by rank, as ``Popen.returncode``: negative for a signal.
    failed : the ranks that failed by themselves, in the order in which they ended.
    """

    statuses: tuple[int, ...]
    failed: tuple[int, ...]


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
    grace_seconds: float = GRACE_SECONDS,
    save_seconds: float = SAVE_SECONDS,
    received: Callable[[], Sequence[int]] = lambda: (),
) -> RankExits:
    """Run ``commands[rank]`` for every rank and return how they ended, once no process is left.

    After the first failure the other ranks have ``grace_seconds`` to report why they fail, too.
    After an exception (Ctrl-C), all are killed together with every process that they started. On
    Linux the ranks are also killed if this process is killed. No time is too long: ranks that wait
    for a silent one fail by themselves after their ``--timeout``. Several ranks get the run's
    token, a new one unless the environment has one.

    Parameters
    ----------
    outputs : a file for each rank's stdout and stderr; None, or no files: this process's own.
    environments : of each rank; none: this process's own.
    received, save_seconds : as of ``wait_for_ranks``.
    """
    environments = environments or [os.environ] * len(commands)
    outputs = outputs or [None] * len(commands)
    several = len(commands) > 1
    token = {RUN_TOKEN: with_run_token(environments[0])[RUN_TOKEN]} if several else {}
    ranks: list[Popen] = []

    def pass_on(number: int) -> None:
        for rank in ranks:
            rank.send_signal(number)

    try:
        with batch_scheduling(len(commands) > usable_cores()):
            for command, variables, output in zip(commands, environments, outputs, strict=True):
                stderr = output and STDOUT
                ranks.append(
                    start_child(command, env={**variables, **token}, stdout=output, stderr=stderr)
                )
        failed = wait_for_ranks(
            lambda: [rank.poll() for rank in ranks],
            grace_seconds=grace_seconds,
            save_seconds=save_seconds,
            received=received,
            pass_on=pass_on,
        )
    finally:
        for rank in ranks:
            kill_group(rank)
        for rank in ranks:
            rank.wait()
    return RankExits(tuple(rank.returncode for rank in ranks), tuple(failed))


def launch_local_ranks(
    command: Sequence[str], variables: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> int:
    """Run ``python command`` once for each of ``variables``; return the exit status.

    That is 0, the status of the rank that failed first, 75 if the ranks stopped after saving, or
    128 + n after signal n. The first signal is passed on to the ranks, which have time to save and
    end; the second one kills them.
    """
    received: list[int] = []
    with on_signals(_SIGNALS, lambda number, _frame: received.append(number)):
        exits = run_local_ranks(
            [[sys.executable, "-u", *command]] * len(variables),
            environments=[{**environment, **of_rank} for of_rank in variables],
            received=lambda: received,
        )
    if set(exits.statuses) <= {0, TO_BE_CONTINUED}:
        return max(exits.statuses)
    if len(received) > 1:
        print_to_stderr("interrupted: a second signal killed the ranks")
        return INTERRUPTED
    if received:
        return 128 + received[0]
    rank = exits.failed[0]
    status = exits.statuses[rank]
    print_to_stderr(f"rank {rank} failed first: it {how_ended(status)}; its message is above")
    return shell_status(status)
