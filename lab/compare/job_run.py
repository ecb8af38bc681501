"""``lab run-cell``: one run of a plan on one of its nodes. A launcher starts it on each node.

It leaves a finished run alone, refuses one that another job holds, and checks nodes and code. Then
it runs the part as a child process and logs its output to ``logs/<cell>-<repeat>/rank<r>.txt``.
After a failure each rank writes ``rank<r>.failed.json`` to that folder, and rank 0 raises the error
of the rank that failed first. No other run writes there.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from common.distributed.launch_env import LaunchSpec
from common.distributed.spawn import run_local_ranks
from common.errors import GroupError, UserError
from common.utils.atomic_files import regular_target, write_atomically
from common.utils.processes import shell_status
from common.utils.typed_json import encode
from lab.compare.cells import Run, node_command
from lab.compare.job_plan import (
    code_of_runs,
    failure_file,
    name_of,
    outcome_of,
    output_file,
    planned_run,
    refuse_links,
)
from lab.compare.job_results import FailureNote, try_lock, why_failed
from lab.compare.outcomes import describe_times

_POLL_SECONDS = 0.1
_LOCK_SECONDS = 1.0
_GRACE_SECONDS = 20.0
_OTHERS_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_WRONG_INPUT = 2


def run_cell(folder: Path, number: int, launch: LaunchSpec) -> int:
    """Run this node's part of run ``number`` of the plan in ``folder``; return the exit status.

    launch : rank and number of nodes; if the cell has fewer nodes, the last ones have nothing to
    do. Raises UserError if another job holds the run. Rank 0 also raises UserError if the run
    cannot start here and GroupError if it failed; the other ranks write the reason to their logs.
    """
    run, code = planned_run(folder, number)
    if launch.rank >= run.nodes:
        return 0
    refuse_links(run, launch.rank)
    with _claimed(output_file(run, launch.rank)) as log:
        regular_target(failure_file(run, launch.rank)).unlink(missing_ok=True)
        if outcome_of(run) is not None:
            return _succeed(launch, f"{name_of(run)} is already done; nothing to do")
        log.truncate(0)
        try:
            _check(run, code, launch)
            status, why = _run_part(run, launch, log)
        except UserError as error:
            _note_failure(run, launch, log, _WRONG_INPUT, str(error))
            if launch.rank == 0:
                raise
            return _WRONG_INPUT
        if status == 0 and launch.rank > 0:
            return 0
        if status == 0:
            if outcome := outcome_of(run):
                return _succeed(launch, f"{name_of(run)}: {describe_times(outcome)}")
            why = f"the part ended without an error, but {run.path} is incomplete"
        _note_failure(run, launch, log, status, why)
    if launch.rank > 0:
        return 1
    _wait_for_others(run)
    raise GroupError(f"{name_of(run)}: {why_failed(run)}")


def _succeed(launch: LaunchSpec, words: str) -> int:
    if launch.rank == 0:
        print(words, flush=True)
    return 0


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[IO[bytes]]:
    """Open and lock this rank's log, so that a second job with the same run is refused.

    The part inherits the lock. A file system without locks lets both jobs run.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = regular_target(path).open("ab")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): allow writing there on each node"
        ) from error
    with file:
        deadline = time.monotonic() + _LOCK_SECONDS  # a report takes the lock for a moment
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UserError(
                    f"this run is already running: another job holds {path}; wait until it ends"
                )
            time.sleep(_POLL_SECONDS)
        yield file


def _check(run: Run, code: Mapping[str, str], launch: LaunchSpec) -> None:
    """Raise UserError if there are too few nodes, or this node's code differs from the plan's."""
    name, nodes = name_of(run), run.nodes
    if launch.world_size < nodes:
        raise UserError(
            f"{name} needs {nodes} nodes, and there {'is' if launch.world_size == 1 else 'are'} "
            f"{launch.world_size}: start it on at least {nodes}, e.g. with sbatch --nodes={nodes}"
        )
    if nodes > 1 and launch.master_ip is None:
        raise UserError(
            f"{name} has {nodes} nodes: give --master-ip, --num-nodes and --rank on each"
        )
    here = code_of_runs()
    if other := sorted(name for name in here | dict(code) if here.get(name) != code.get(name)):
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise UserError(
            f"{os.uname().nodename} has other code than the plan ({shown}), so its times would not "
            "be comparable: restore that code, or make a new plan with lab compare --plan"
        )


def _run_part(run: Run, launch: LaunchSpec, log: IO[bytes]) -> tuple[int, str]:
    """Run the part; return its exit status, as a shell reports it, and why it was stopped.

    A signal is passed on as SIGTERM; the part then has ``_GRACE_SECONDS`` to end.
    """
    group = {
        "--master-ip": launch.master_ip,
        "--master-port": launch.master_port,
        "--num-nodes": run.nodes,
        "--rank": launch.rank,
    }
    flags = [str(word) for flag in group.items() for word in flag] if run.nodes > 1 else []
    if launch.rank == 0:
        _remove(run.path)  # of an attempt that was interrupted; the others wait for rank 0
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in _SIGNALS
    }
    try:
        exits = run_local_ranks(
            [[sys.executable, *node_command(run), *flags]],
            outputs=[log],
            grace_seconds=_GRACE_SECONDS,
            stop_signal=lambda: signal.SIGTERM if received else None,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    [status] = exits.statuses
    why = (
        f"stopped by {signal.Signals(received[0]).name}, as at a time limit or after the loss of a "
        "node; the same command starts the run from the beginning"
        if received and status != 0
        else ""
    )
    return shell_status(status), why


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        if path.exists():
            raise UserError(
                f"{path} of an earlier attempt cannot be removed ({error.strerror}): remove it"
            ) from error


def _note_failure(run: Run, launch: LaunchSpec, log: IO[bytes], status: int, why: str) -> None:
    if why:
        log.write(f"error: {why}\n".encode())
        log.flush()
    note = FailureNote(status, os.uname().nodename)
    write_atomically(failure_file(run, launch.rank), encode(note))


def _wait_for_others(run: Run) -> None:
    """Wait a moment for the other ranks to note why they failed: one may have failed first."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while time.monotonic() < deadline and not all(
        failure_file(run, rank).exists() for rank in range(run.nodes)
    ):
        time.sleep(_POLL_SECONDS)
