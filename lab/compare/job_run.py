"""One run of a plan on one of its nodes, as any launcher starts it on each: ``lab run-cell``.

Order: skip a run that is done, refuse one that another job holds; check nodes and code; run the part as a child process and log
its output to ``logs/<cell>-<repeat>/rank<r>.txt``; after a failure write ``rank<r>.failed.json`` there, and on rank 0 raise the
error of the rank that failed first. No other run writes there.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from common.distributed.launch_env import LaunchSpec
from common.errors import GroupError, UserError
from common.utils.atomic_files import write_atomically
from common.utils.processes import kill_on_parent_exit
from lab.compare.cells import node_command
from lab.compare.job_plan import PlannedRun, code_of_runs, planned_run
from lab.compare.job_results import why_failed
from lab.processes.local_ranks import end

_POLL_SECONDS = 0.1
_LOCK_SECONDS = 1.0
_GRACE_SECONDS = 20.0
_OTHERS_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_WRONG_INPUT = 2


def run_cell(folder: Path, number: int, launch: LaunchSpec) -> int:
    """Run this node's part of run ``number`` of the plan in ``folder``; return the exit status.

    launch : rank and number of the nodes that there are, which may be more than the cell has: the last ones have nothing to do.
    Raises UserError on a folder without that run and, on rank 0, on what cannot run here; GroupError, on rank 0, where the run
    failed. The other ranks write the reason to their logs.
    """
    run, code = planned_run(folder, number)
    if launch.rank >= run.nodes and launch.size >= run.nodes:
        return 0
    with _claimed(run.log(launch.rank)) as log:
        run.failure(launch.rank).unlink(missing_ok=True)
        if run.outcome() is not None:
            return _print_on_rank0(f"{run.name} is done already; left as it is", launch)
        log.truncate(0)
        try:
            _check(run, code, launch)
            status, why = _supervise(run, launch, log)
        except UserError as error:
            _note_failure(run, launch, log, _WRONG_INPUT, str(error))
            if launch.rank == 0:
                raise
            return _WRONG_INPUT
        outcome = run.outcome() if launch.rank == 0 else {}
        if status == 0 and outcome is not None:
            return _print_on_rank0(_measured(run, outcome), launch) if launch.rank == 0 else 0
        if status == 0:
            why = f"the part ended well, but {run.path} is not whole"
        _note_failure(run, launch, log, status, why)
    if launch.rank > 0:
        return 1
    _wait_for_others(run)
    raise GroupError(f"{run.name}: {why_failed(run)}")


def _print_on_rank0(words: str, launch: LaunchSpec) -> int:
    if launch.rank == 0:
        print(words, flush=True)
    return 0


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[IO[bytes]]:
    """Open this rank's log and hold a lock on it, so that the same run in two jobs at once is noticed, where the nodes' file
    system has locks. The part inherits it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): permit writing there, on each node"
        ) from error
    with file:
        deadline = time.monotonic() + _LOCK_SECONDS  # a report takes the lock for a moment
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"this run is under way already: another job holds {path}; wait for its end"
                    ) from None
                time.sleep(_POLL_SECONDS)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield file


def _check(run: PlannedRun, code: Mapping[str, str], launch: LaunchSpec) -> None:
    if launch.size < run.nodes:
        raise UserError(
            f"{run.name} needs {run.nodes} nodes, and there {'is' if launch.size == 1 else 'are'} {launch.size}: start "
            f"it on {run.nodes} or more, e.g. by sbatch --nodes={run.nodes}"
        )
    if run.nodes > 1 and launch.master_ip is None:
        raise UserError(
            f"{run.name} has {run.nodes} nodes: give --master-ip, --num-nodes and --rank on each"
        )
    here = code_of_runs()
    if other := sorted(name for name in here | dict(code) if here.get(name) != code.get(name)):
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise UserError(
            f"{os.uname().nodename} has other code than the plan was made with ({shown}), and its times would not "
            "be comparable: go back to that code, or plan anew with lab compare --plan"
        )


def _supervise(run: PlannedRun, launch: LaunchSpec, log: IO[bytes]) -> tuple[int, str]:
    """Run the part to its end; return its exit status, and which signal to this process ended it, if one did, in words."""
    command = [sys.executable, *node_command(run.settings, run.cell, run.repeat, run.folder)]
    if run.nodes > 1:
        command += [
            "--master-ip",
            str(launch.master_ip),
            "--master-port",
            str(launch.master_port),
            "--num-nodes",
            str(run.nodes),
            "--rank",
            str(launch.rank),
        ]
    if launch.rank == 0:
        _remove(run.path)  # of an attempt that was interrupted; the others wait for rank 0
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in _SIGNALS
    }
    try:
        status = _wait(
            subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=kill_on_parent_exit(),
            ),
            received,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not received or status == 0:
        return status, ""
    name = signal.Signals(received[0]).name
    return (
        status,
        f"stopped by {name}, as at a time limit or after a node's loss; started again, the run begins anew",
    )


def _wait(process: subprocess.Popen, received: list[int]) -> int:
    """Wait for the part; pass a received signal on as SIGTERM, and kill it after a grace period. Return its exit status, as a
    shell does."""
    kill_at = None
    try:
        while process.poll() is None and (kill_at is None or time.monotonic() < kill_at):
            if received and kill_at is None:
                process.terminate()
                kill_at = time.monotonic() + _GRACE_SECONDS
            time.sleep(_POLL_SECONDS)
    finally:
        end([process])
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"{path}, of an earlier attempt, cannot be removed ({error.strerror})"
        ) from error


def _note_failure(
    run: PlannedRun, launch: LaunchSpec, log: IO[bytes], status: int, why: str
) -> None:
    if why:
        log.write(f"error: {why}\n".encode())
        log.flush()
    record = {"status": status, "host": os.uname().nodename}
    write_atomically(run.failure(launch.rank), json.dumps(record).encode())


def _wait_for_others(run: PlannedRun) -> None:
    """The other ranks, too, note why they failed, and one of them may be the first."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while time.monotonic() < deadline and not all(
        run.failure(rank).exists() for rank in range(run.nodes)
    ):
        time.sleep(_POLL_SECONDS)


def _measured(run: PlannedRun, outcome: Mapping[str, Any]) -> str:
    step, sync = (
        fmean(rank["seconds"][name] for rank in outcome["ranks"]) for name in ("step", "sync")
    )
    return f"{run.name}: {step:.3f} s a step, {sync:.3f} of it sync"
