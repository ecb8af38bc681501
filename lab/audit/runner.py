"""Run a script under the probe on a number of ranks, and end it when it has shown enough.

``run_audit_size`` starts the processes, waits, and leaves nothing behind. The probe's records and
each process's output stay in the folder of the run.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from common.errors import UserError, file_errors
from common.utils.processes import kill_on_parent_exit
from common.utils.system import free_port, usable_cores
from lab.audit.command import AuditCommand
from lab.audit.isolation import RunNetwork, end_processes, processes_of, work_done
from lab.audit.recording import ADVICE, RankRecords, RecordReader, read_stranger

HOOK = Path(__file__).with_name("probe") / "hook"
"""The folder that loads the probe when it is on PYTHONPATH."""
DEFAULT_LIMIT_SECONDS = 300.0
TOO_OLD = ("0.", "1.")
"""Beginnings of versions of torch: the hooks that the probe needs came with 2.0."""
MOST_OUTPUT = 256 * 2**20
"""Bytes that a process may print before the run is ended."""
_SHOWN_OUTPUT = 2**20
_POLL_SECONDS = 0.1
_FAILED_EARLY_SECONDS, _FAILED_SECONDS = 3.0, 8.0  # for the others to fail, too
_CUT_SECONDS, _CUT_ALONE_SECONDS = 6.0, 30.0
_MISSING_RANKS_SECONDS = 8.0
_APART_SECONDS = 8.0  # for ranks that wait in different calls
_STACK_SECONDS = 2.0
_TERMINATE_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_IDLE_SHARE = 0.05  # of one core: ranks that wait for each other use less
_QUIET_SECONDS, _QUIET_STEPS = 60.0, 20.0
"""Without --timeout, a run ends if it records nothing for so long, or for the time of 20 steps."""


class StartedProcess(Protocol):
    """What ``start`` returns; subprocess.Popen is one."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""


Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], StartedProcess]
"""Starts a command: its words, its whole environment, its folder, and the file for its output."""


@dataclass(frozen=True)
class RunSettings:
    """How long a script runs, and what its probe records.

    Parameters
    ----------
    steps : optimiser steps after which the probe ends the script.
    limit_seconds : for the whole run; None: as long as its own steps let expect.
    idle_seconds : a script that computes nothing and records nothing for so long has hung.
    cwd : folder in which the script runs.
    """

    steps: int = 6
    clocks: bool = False
    limit_seconds: float | None = None
    idle_seconds: float = 20.0
    cwd: Path = field(default_factory=Path.cwd)


def run_audit_size(
    command: AuditCommand,
    size: int | None,
    folder: Path,
    settings: RunSettings,
    *,
    network: RunNetwork | None = None,
    start: Start | None = None,
) -> "AuditRun":
    """Run a command on ``size`` ranks of this machine until its probe has seen enough.

    Parameters
    ----------
    size : None if the command does not take it.
    folder : an empty folder for the records and the output.
    network : default: loopback.
    start : how to start a process; the default starts a new one in a session of its own. Tests
        pass one that forks. The environment that it gets holds all that the probe needs.

    Returns when every process has ended. Raises OSError if a process cannot be started, UserError
    for a torch that is too old, and for a script that prints without end or spoils the records.
    """
    network = network or RunNetwork()
    run = AuditRun(command, size, folder, settings)
    port = free_port(address="127.0.0.1")
    processes = command.processes(size, master=network.master, port=port)
    try:
        for rank, words in enumerate(processes):
            variables = _environment(command, size, rank, folder, settings, network, port)
            prefixed = [*network.prefix(rank), *words]
            process = (start or start_process)(prefixed, variables, settings.cwd, run.log(rank))
            run.started.append(process)
        run.wait()
    finally:
        end_processes(folder, [one.pid for one in run.started], grace_seconds=_TERMINATE_SECONDS)
    return run


def start_process(
    words: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path
) -> StartedProcess:
    """Start a command in a session of its own, without input; see ``Start``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=kill_on_parent_exit(),
        )


def _environment(
    command: AuditCommand,
    size: int | None,
    rank: int,
    folder: Path,
    settings: RunSettings,
    network: RunNetwork,
    port: int,
) -> dict[str, str]:
    """Return a process's environment: defaults, the user's, and the probe's settings.

    PATH stays the user's: ``python`` in the command is the interpreter that a shell would start.
    """
    probe = {
        "folder": str(folder),
        "script": str(command.user_folder(settings.cwd)),
        "steps": settings.steps,
        "rank": rank if command.one_process_a_rank else None,
        "size": size,
        "clocks": settings.clocks,
    }
    given = {
        "MASTER_ADDR": network.master,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // (size or 2))),
        "GLOO_SOCKET_IFNAME": network.interface,
        "PYTHONPATH": "",
        **os.environ,
    }
    path = os.pathsep.join(filter(None, [str(HOOK), given["PYTHONPATH"]]))
    return given | {"PYTHONPATH": path, "LAB_AUDIT": json.dumps(probe)}


class AuditRun:
    """A run of the script: it decides when the processes have to be ended, and says how they ended.

    Attributes
    ----------
    size : the number of ranks asked for; None if the script chooses it.
    folder : with the probe's records and the log of each process.
    started : the processes that were started.
    statuses : exit status of each; None if it had to be ended.
    failed : those that ended with an error before the script was cut, and when; the earliest first.
    hung : why, if the ranks waited for each other, or ran longer than the limit.
    wanted_size : the number of ranks for which the script waited, if that is not ``size``.
    """

    def __init__(
        self, command: AuditCommand, size: int | None, folder: Path, settings: RunSettings
    ) -> None:
        self._command, self._settings = command, settings
        self.size, self.folder = size, folder
        self.started: list[StartedProcess] = []
        self.statuses: tuple[int | None, ...] = ()
        self.failed: dict[int, float] = {}
        self.hung: str | None = None
        self.wanted_size: int | None = None
        self._reader = RecordReader(folder)
        self._began = self._active = self._recorded = self._looked = time.monotonic()
        self._work = self._longest_quiet = 0.0

    def log(self, process: int) -> Path:
        """Return the file of what a process writes, stdout and stderr."""
        return self.folder / f"rank{process}.log"

    def output(self, process: int) -> str:
        """Return the end of what a process has written."""
        content = read_stranger(self.log(process), most=_SHOWN_OUTPUT, last=True)
        return content.decode(errors="replace")

    def wait(self) -> None:
        """Return when all processes have ended, or have to be ended."""
        while True:
            self.statuses, now = tuple(one.poll() for one in self.started), time.monotonic()
            self._read(now)
            for number, status in enumerate(self.statuses):
                if status:
                    self.failed.setdefault(number, now)
            if None not in self.statuses or self._enough(now):
                break
            time.sleep(_POLL_SECONDS)
        if self._with("cut"):
            self.failed.clear()
        if self.hung is not None:
            with file_errors("the audit's folder cannot be written", ADVICE):
                (self.folder / "dump").touch()  # the probe of each rank records its stacks
            time.sleep(_STACK_SECONDS)

    def _read(self, now: float) -> None:
        """Read what is new. Raises UserError for a torch that is too old."""
        if self._reader.read():
            self._longest_quiet = max(self._longest_quiet, now - self._recorded)
            self._active = self._recorded = now
        for one in self._with("torch"):
            version = str(one.by_kind["torch"][0]["version"])
            if version.startswith(TOO_OLD):
                raise UserError(
                    f"the script runs with torch {version}, and lab audit works with torch 2.0 and "
                    "newer: give the Python of an environment that has one, as in lab audit -- "
                    "/path/to/python main.py"
                )

    def _with(self, kind: str) -> list[RankRecords]:
        """Return the processes that have written a record of this kind."""
        return [one for one in self._reader.processes.values() if one.by_kind[kind]]

    def _look(self, now: float) -> None:
        """Notice whether the processes have computed or written since the last look.

        Raises UserError if a process has printed too much.
        """
        work = work_done(processes_of(self.folder, [one.pid for one in self.started]).values())
        if work - self._work > _IDLE_SHARE * (now - self._looked):
            self._active = now
        self._work, self._looked = work, now
        for number in range(len(self.started)):
            with file_errors("the script's output cannot be read", ADVICE):
                printed = self.log(number).lstat().st_size
            if printed > MOST_OUTPUT:
                raise UserError(
                    f"a rank printed more than {MOST_OUTPUT:,} bytes: make it print less"
                )

    def _enough(self, now: float) -> bool:
        """Return whether the run has to be ended now."""
        if now > self._looked + _LOOK_SECONDS:
            self._look(now)
        cut, quiet = self._with("cut"), now - self._recorded
        if cut:
            limit = min(max(_CUT_SECONDS, self._longest_quiet), _CUT_ALONE_SECONDS)
            all_cut = all(one in cut for one in self._with("step"))
            return quiet > (limit if all_cut else _CUT_ALONE_SECONDS)
        if self.failed:
            grace = _FAILED_SECONDS if self._worlds() else _FAILED_EARLY_SECONDS
            return now > min(self.failed.values()) + grace
        self.hung = self._hang(now, quiet)
        self.wanted_size = self._other_size(quiet)
        return self.hung is not None or self.wanted_size is not None

    def _hang(self, now: float, quiet: float) -> str | None:
        """Return why the run is not going to end, or takes too long; None if it may go on."""
        limit, idle = self._settings.limit_seconds, now - self._active
        times = [record["t"] for one in self._with("step")[:1] for record in one.by_kind["step"]]
        step_seconds = max((after - before for before, after in pairwise(times)), default=0.0)
        slow = _QUIET_STEPS * step_seconds
        if now > self._began + (limit or max(DEFAULT_LIMIT_SECONDS, slow)):
            return f"the script did not end within {now - self._began:.0f} s"
        if limit is None and len(times) > 1 and quiet > max(_QUIET_SECONDS, slow):
            return (
                f"nothing happened for {quiet:.0f} s, after steps of {step_seconds:.1f} s "
                "(--timeout waits longer)"
            )
        apart = idle > _APART_SECONDS and self._stand_apart()
        if self._with("call") and (apart or idle > self._settings.idle_seconds):
            return f"no rank made progress for {idle:.0f} s"
        return None

    def _stand_apart(self) -> bool:
        """Return whether all ranks wait in calls that cannot meet, or for a rank that has ended.

        A sender and a receiver may meet, however slow their link is.
        """
        ranks = self._with("call")
        waiting = [one for one in ranks if not one.by_kind["end"]]
        if not waiting or any(one.records[-1]["k"] not in ("call", "stands") for one in waiting):
            return False
        calls = set()
        for one in waiting:
            last = one.records[-1]
            if last.get("c") is not None:  # else it stands in backward
                last = one.by_kind["call"][-1]
            calls.add((last["name"] or "backward", last.get("bytes")))
        some_ended = len(waiting) < len(ranks) or any(one is not None for one in self.statuses)
        meet = any("send" in name for name, _ in calls)
        receive = len(waiting) > 1 and all("recv" in name for name, _ in calls)
        return not meet and (some_ended or receive or len(calls) > 1)

    def _worlds(self) -> list[int]:
        """Return with how many ranks each process makes its group."""
        processes = self._reader.processes.values()
        told = [record for one in processes for record in one.by_kind["call"][:1]]
        return [record["world"] for record in told if record.get("world")]

    def _other_size(self, quiet: float) -> int | None:
        """Return the number of ranks that the script waits for, if it is not the one asked for."""
        worlds = self._worlds()
        if self.size is None or not self._command.one_process_a_rank or len(set(worlds)) != 1:
            return None
        world, here = worlds[0], len(worlds)
        missing = here == self.size < world and quiet > _MISSING_RANKS_SECONDS
        return world if missing or (here >= world > 1 and world < self.size) else None
