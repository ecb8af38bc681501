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
from pathlib import Path
from typing import Protocol

from common.utils.processes import kill_on_parent_exit
from common.utils.system import free_port
from lab.audit.command import AuditCommand
from lab.audit.leftovers import end_processes, processes_of, work_done
from lab.audit.progress import StepProgress
from lab.cluster.program import node_environment

HOOK = Path(__file__).with_name("probe") / "hook"
"""The folder that loads the probe when it is on PYTHONPATH."""
_POLL_SECONDS = 0.1
_FAILED_EARLY_SECONDS, _FAILED_SECONDS = 3.0, 8.0  # for the others to fail, too
_CUT_SECONDS, _CUT_ALONE_SECONDS, _REPLAY_SECONDS = 6.0, 30.0, 120.0
_MISSING_RANKS_SECONDS = 8.0
_STACK_SECONDS = 2.0
_TERMINATE_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_IDLE_SHARE = 0.05  # of one core: ranks that wait for each other use less


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
class RunNetwork:
    """Where the ranks run.

    master : the address of rank 0.
    interface : for Gloo.
    prefix : returns the words before a rank's command that bring it into its namespace.
    """

    master: str = "127.0.0.1"
    interface: str = "lo"
    prefix: Callable[[int], Sequence[str]] = lambda rank: ()


@dataclass(frozen=True)
class RunSettings:
    """How long a script runs, and what its probe records.

    Parameters
    ----------
    steps : optimiser steps after which the probe ends the script.
    limit_seconds : for the whole run.
    idle_seconds : a script that computes nothing and records nothing for so long has hung.
    cwd : folder in which the script runs.
    """

    steps: int = 6
    clocks: bool = False
    replay: bool = False
    limit_seconds: float = 300.0
    idle_seconds: float = 20.0
    cwd: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Parameters
    ----------
    size : the number of ranks asked for; None if the script chose it.
    folder : with the probe's records and ``rank<r>.log`` of each process.
    statuses : exit status of each process that was started; None if it had to be ended.
    failed : those that ended with an error before the script was cut, the earliest first.
    steps : most steps that a rank recorded.
    hung : the ranks waited for each other, or ran longer than the limit.
    wanted_size : the number of ranks for which the script waited, if that is not ``size``.
    """

    size: int | None
    folder: Path
    seconds: float
    statuses: tuple[int | None, ...]
    failed: tuple[int, ...]
    steps: int
    hung: str | None = None
    wanted_size: int | None = None

    def output(self, process: int) -> str:
        """Return what a process has written, stdout and stderr."""
        return _log(self.folder, process).read_text(errors="replace")


def run_audit_size(
    command: AuditCommand,
    size: int | None,
    folder: Path,
    settings: RunSettings,
    *,
    network: RunNetwork | None = None,
    start: Start | None = None,
) -> RunEnd:
    """Run a command on ``size`` ranks of this machine until its probe has seen enough.

    Parameters
    ----------
    size : None if the command does not take it.
    folder : an empty folder for the records and the output.
    network : default: loopback.
    start : how to start a process; the default starts a new one in a session of its own. Tests
        pass one that forks. The environment that it gets holds all that the probe needs.

    Returns when every process has ended. Raises OSError if a process cannot be started.
    """
    network, began = network or RunNetwork(), time.monotonic()
    started: list[StartedProcess] = []
    port = free_port(address="127.0.0.1")
    processes = command.processes(size, master=network.master, port=port)
    try:
        for rank, words in enumerate(processes):
            variables = _environment(command, size, rank, folder, settings, network, port)
            prefixed = [*network.prefix(rank), *words]
            log = _log(folder, rank)
            started.append((start or start_process)(prefixed, variables, settings.cwd, log))
        watch = _RunWatch(command, size, folder, settings, started)
        watch.wait()
    finally:
        end_processes(
            folder,
            [one.pid for one in started],
            grace_seconds=_TERMINATE_SECONDS,
            reap=lambda: [one.poll() for one in started],
        )
    return watch.end(time.monotonic() - began)


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
    """Return a process's environment: the user's, with defaults, and the probe's settings."""
    probe = {
        "folder": str(folder),
        "script": str(command.user_folder(settings.cwd)),
        "steps": settings.steps,
        "rank": rank if command.one_process_a_rank else None,
        "size": size,
        "clocks": settings.clocks,
        "replay": settings.replay,
    }
    given = {"MASTER_ADDR": network.master, "MASTER_PORT": str(port), **os.environ}
    path = os.pathsep.join(filter(None, [str(HOOK), given.get("PYTHONPATH")]))
    return {
        **node_environment(given, nodes=size or 2, interface=network.interface),
        "PYTHONPATH": path,
        "LAB_AUDIT": json.dumps(probe),
    }


def _log(folder: Path, process: int) -> Path:
    return folder / f"rank{process}.log"


class _RunWatch:
    """Waits for the processes of a run, and decides when they have to be ended."""

    def __init__(
        self,
        command: AuditCommand,
        size: int | None,
        folder: Path,
        settings: RunSettings,
        started: Sequence[StartedProcess],
    ) -> None:
        self._command, self._size, self._folder = command, size, folder
        self._settings, self._started = settings, started
        self._progress = StepProgress(folder)
        self._began = self._active = self._recorded = self._looked = time.monotonic()
        self._work = self._longest_quiet = 0.0
        self._failed: list[int] = []
        self._first_failure: float | None = None
        self._hung: str | None = None
        self._wanted: int | None = None
        self._statuses: list[int | None] = [None] * len(started)

    def wait(self) -> None:
        """Return when all processes have ended, or have to be ended."""
        while any(status is None for status in self._statuses):
            now = time.monotonic()
            if self._progress.read():
                self._longest_quiet = max(self._longest_quiet, now - self._recorded)
                self._active = self._recorded = now
            self._take_statuses(now)
            if now > self._looked + _LOOK_SECONDS:
                self._look_for_work(now)
            if self._enough(now):
                break
            time.sleep(_POLL_SECONDS)
        self._progress.read()
        if self._hung is not None:
            (self._folder / "dump").touch()  # the probe of each rank records its stacks
            time.sleep(_STACK_SECONDS)

    def end(self, seconds: float) -> RunEnd:
        """Return how the run ended."""
        return RunEnd(
            self._size,
            self._folder,
            seconds,
            tuple(self._statuses),
            () if self._progress.processes_with("cut") else tuple(self._failed),
            self._progress.steps,
            self._hung,
            self._wanted,
        )

    def _take_statuses(self, now: float) -> None:
        for number, process in enumerate(self._started):
            if self._statuses[number] is None:
                status = self._statuses[number] = process.poll()
                if status:
                    self._failed.append(number)
                    self._first_failure = self._first_failure or now

    def _enough(self, now: float) -> bool:
        """Return whether the run has to be ended now."""
        settings, cut = self._settings, self._progress.processes_with("cut")
        quiet = now - self._recorded
        if cut:
            if settings.replay:
                return quiet > _REPLAY_SECONDS
            if cut >= self._progress.processes_with("step"):
                return quiet > min(max(_CUT_SECONDS, self._longest_quiet), _CUT_ALONE_SECONDS)
            return quiet > _CUT_ALONE_SECONDS
        if self._first_failure is not None:
            grace = _FAILED_SECONDS if self._progress.worlds else _FAILED_EARLY_SECONDS
            return now > self._first_failure + grace
        if now > self._began + settings.limit_seconds:
            self._hung = f"the script did not end within {settings.limit_seconds:g} s"
        elif self._progress.processes_with("call") and now > self._active + settings.idle_seconds:
            self._hung = f"no rank made progress for {now - self._active:.0f} s"
        self._wanted = self._other_size(quiet)
        return self._hung is not None or self._wanted is not None

    def _look_for_work(self, now: float) -> None:
        """Notice whether the processes have computed or written since the last look."""
        work = work_done(processes_of(self._folder, [one.pid for one in self._started]).values())
        if work - self._work > _IDLE_SHARE * (now - self._looked):
            self._active = now
        self._work, self._looked = work, now

    def _other_size(self, quiet: float) -> int | None:
        """Return the number of ranks that the script waits for, if it is not the one asked for."""
        worlds = set(self._progress.worlds.values())
        if self._size is None or not self._command.one_process_a_rank or len(worlds) != 1:
            return None
        world, here = worlds.pop(), len(self._progress.worlds)
        missing = here == self._size < world and quiet > _MISSING_RANKS_SECONDS
        return world if missing or (here >= world > 1 and world < self._size) else None
