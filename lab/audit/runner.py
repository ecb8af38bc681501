"""Run a script under the probe on a number of ranks, and end it when it has shown enough.

``run_audit_size`` starts the processes, waits, and leaves nothing behind. The probe's records and
each process's output stay in the folder of the run.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from common.errors import UserError
from common.utils.atomic_files import read_regular
from common.utils.processes import GRACE_SECONDS, start_child
from common.utils.system import free_port, usable_cores
from lab.audit.command import AuditCommand
from lab.audit.findings import collectives
from lab.audit.findings.finding import Finding
from lab.audit.findings.private import shared_part
from lab.audit.isolation import LOOPBACK, RunNetwork, end_processes, running
from lab.audit.recording import RankRecords, Recording, RecordReader
from lab.audit.records import AnyRecord, CollectiveCall, Cut, Step
from lab.audit.result import Failure

# The folder that loads the probe when it is on PYTHONPATH.
HOOK = Path(__file__).with_name("probe") / "hook"
DEFAULT_LIMIT_SECONDS = 300.0
# Bytes that a process may print before the run is ended.
MOST_OUTPUT = 256 * 2**20
_FEWEST_STEPS = 4
_POLL_SECONDS = 0.1
# After the cut the run ends when nothing is recorded for so long, or for as long as before the cut,
# up to the second number.
_CUT_SECONDS = 8.0
_MOST_CUT_SECONDS = 30.0
# How long other ranks may take to fail after the first one, missing ranks to come, and ranks that
# call different collectives to go on.
_CERTAIN_SECONDS = GRACE_SECONDS
_STACK_SECONDS = 2.0  # for the ranks to record their stacks
_TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_LOOK_SECONDS = 2.0  # between two looks at what the processes compute
_IDLE_SHARE = 0.05  # of one core: ranks that wait for each other use less
# Without --timeout, a run ends if it records nothing for so long, or for the time of 20 steps.
_QUIET_SECONDS = 60.0
_QUIET_STEPS = 20.0


@dataclass(frozen=True)
class RunSettings:
    """How long a script runs, and what its probe records.

    Parameters
    ----------
    steps : optimiser steps after which the probe ends the script; None: it goes on to its end, if
        that comes in time, see probe/stopping.py.
    limit_seconds : for the whole run; None: as long as its own steps let expect.
    idle_seconds : a script that computes nothing and records nothing for so long has hung.
    cwd : folder in which the script runs.
    global_batch : what ``--global-batch`` says, or None.
    inputs : what each rank reads from stdin; empty: nothing.
    """

    steps: int | None = None
    clocks: bool = False
    limit_seconds: float | None = None
    idle_seconds: float = 20.0
    cwd: Path = field(default_factory=Path.cwd)
    global_batch: int | None = None
    inputs: Sequence[bytes] = ()

    @property
    def fewest_steps(self) -> int:
        """The fewest steps of which something can be said."""
        return min(_FEWEST_STEPS, self.steps or _FEWEST_STEPS)


def start_process(
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    log: Path,
    given: bytes = b"",
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    Parameters
    ----------
    environment : the whole one, with all that the probe needs.
    log : the file for its output.
    given : what it reads from stdin; at most what a pipe holds, 64 KiB.
    """
    reads, writes = os.pipe()
    with log.open("ab") as output, os.fdopen(reads) as stdin:
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(given)
        return start_child(
            words, env=environment, cwd=cwd, stdin=stdin, stdout=output, stderr=subprocess.STDOUT
        )


def run_audit_size(
    command: AuditCommand,
    size: int | None,
    folder: Path,
    settings: RunSettings,
    *,
    network: RunNetwork = LOOPBACK,
    start: Callable[..., Any] = start_process,
) -> "AuditRun":
    """Run a command on ``size`` ranks of this machine until its probe has seen enough.

    Parameters
    ----------
    size : None if the command does not take it.
    folder : an empty folder for the output, and for the records unless the network has one.
    network : default: loopback.
    start : how to start a process; returns what has a Popen's ``pid`` and ``poll``. Tests pass a
        function that forks.

    Returns when every process has ended. Raises OSError if a process cannot be started, UserError
    for a torch that is too old, and for a script that prints without end or spoils the records.
    """
    records = network.records or folder  # as the probe finds the folder; this process: ``outside``
    inherited = dict(os.environ)
    run = AuditRun(command, size, folder, settings, network.outside or records)
    port = free_port(address="127.0.0.1")
    variables = {
        "MASTER_ADDR": network.master,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // (size or 2))),
        "GLOO_SOCKET_IFNAME": network.interface,
        **inherited,  # PATH as well: ``python`` is the interpreter that a shell starts
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), inherited.get("PYTHONPATH")])),
    }
    try:
        for rank, words in enumerate(command.processes(size, master=network.master, port=port)):
            probe = {
                "folder": str(records),
                "script": str(command.user_folder(settings.cwd)),
                "steps": settings.steps,
                "rank": rank if command.one_process_a_rank else None,
                "clocks": settings.clocks,
            }
            own = variables | {"LAB_AUDIT": json.dumps(probe)}
            prefix = network.prefixes[rank % len(network.prefixes)]
            given = settings.inputs[rank : rank + 1]
            run.started.append(start([*prefix, *words], own, settings.cwd, run.log(rank), *given))
        run.wait()
    finally:
        pids = [process.pid for process in run.started]
        end_processes(pids, folder, grace_seconds=_TERMINATE_SECONDS)
    run.recording = run.reader.recording(
        asked_size=size,
        global_batch=settings.global_batch,
        clocks=settings.clocks,
        hung=run.hung is not None,
    )
    return run


class AuditRun:
    """A run of the script: it decides when the processes have to be ended, and says how they ended.

    Attributes
    ----------
    size : the number of ranks asked for; None if the script chooses it.
    folder : with the log of each process.
    records : the folder with the probe's records.
    started : the processes that were started.
    statuses : exit status of each; None if it had to be ended.
    failed : those that ended with an error before the script was cut, and when; the earliest first.
    hung : why, if the ranks waited for each other, or ran longer than the limit.
    reader : reads the records while the processes write them.
    recording : what was recorded; without ranks until all processes have ended.
    failure : why the script could not be audited, or not to its end; see failures.py.

    These times are of time.monotonic(), in seconds:
    _began : the run began.
    _recorded : a process last wrote a record.
    _active : a process last wrote a record, or was last seen to compute.
    _looked : ``_look`` last measured ``_work``, the seconds that all processes have computed.
    _longest_quiet : the longest time without a record so far, in seconds.
    """

    def __init__(
        self,
        command: AuditCommand,
        size: int | None,
        folder: Path,
        settings: RunSettings,
        records: Path | None = None,
    ) -> None:
        self.command = command
        self.settings = settings
        self.size = size
        self.folder = folder
        self.records = records or folder
        self.started: list[Any] = []
        self.statuses: tuple[int | None, ...] = ()
        self.failed: dict[int, float] = {}
        self.hung: str | None = None
        self.reader = RecordReader(self.records)
        self.recording = Recording(size=0, ranks=[])
        self.failure: Failure | None = None
        self._began = time.monotonic()
        self._recorded = self._began
        self._active = self._began
        self._looked = self._began
        self._work = 0.0
        self._longest_quiet = 0.0

    @property
    def wanted_size(self) -> int | None:
        """The number of ranks for which the script waits, if it is not the one asked for.

        None also if the ranks ask for different numbers, or too few have asked yet, or all are
        there, as where each command is a torchrun that starts several.
        """
        if self.size is None or not self.command.one_process_a_rank:
            return None
        first_calls = [process.of(CollectiveCall)[0] for process in self._with(CollectiveCall)]
        worlds = [call.wanted_world_size for call in first_calls if call.wanted_world_size]
        if len(set(worlds)) != 1:
            return None
        wanted: int = worlds[0]
        enough_asked = len(worlds) >= min(wanted, self.size)
        none_missing = self.size < wanted <= len(worlds)
        if wanted in (1, self.size) or none_missing or not enough_asked:
            return None
        return wanted

    @property
    def fixed_size(self) -> int | None:
        """The number of ranks that the script has chosen itself; None if it took what it got.

        It takes what it gets also where each command starts several ranks of a node.
        """
        if wanted := self.wanted_size:
            return wanted
        size = self.recording.size
        of_nodes = self.command.one_process_a_rank and size % (self.size or 1) == 0
        return size if size > 1 and size != self.size and not of_nodes else None

    def log(self, process: int) -> Path:
        """Return the file of what a process writes, stdout and stderr."""
        return self.folder / f"rank{process}.log"

    def output(self, process: int) -> str:
        """Return the end of what a process has written."""
        return read_regular(self.log(process), last_bytes=2**20).decode(errors="replace")

    def wait(self) -> None:
        """Wait until all processes have ended, or have to be ended.

        Errors after the cut do not count. In a run that hung, each rank records its stack.
        """
        while not self._is_over(time.monotonic()):
            time.sleep(_POLL_SECONDS)
        if self._with(Cut):  # the cut itself makes ranks fail
            self.failed.clear()
        if self.hung is not None:
            with suppress(OSError):  # the probe of each rank records its stacks
                dump = self.records / "dump"  # a link that the script has put there stays unused
                os.close(os.open(dump, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
            time.sleep(_STACK_SECONDS)

    def _is_over(self, now: float) -> bool:
        """Return whether all processes have ended, or have to be ended now.

        They have to be some seconds after the cut or the first failure, when the script waits for
        ranks that were not started, and when it hangs.
        """
        self.statuses = tuple(process.poll() for process in self.started)
        for number, status in enumerate(self.statuses):
            if status:
                self.failed.setdefault(number, now)
        if self.reader.read():
            self._longest_quiet = max(self._longest_quiet, now - self._recorded)
            self._active = self._recorded = now
        if None not in self.statuses:
            return True
        if now > self._looked + _LOOK_SECONDS:
            self._look(now)
        quiet = now - self._recorded
        if self._with(Cut):
            return quiet > min(max(_CUT_SECONDS, self._longest_quiet), _MOST_CUT_SECONDS)
        if self.failed:
            return now > min(self.failed.values()) + _CERTAIN_SECONDS
        if wanted := self.wanted_size:
            return wanted < len(self.started) or quiet > _CERTAIN_SECONDS
        self.hung = self._hang(now, quiet)
        return self.hung is not None

    def _with(self, kind: type[AnyRecord]) -> list[RankRecords]:
        """Return the processes that have written a record of this kind."""
        return [process for process in self.reader.processes.values() if process.of(kind)]

    def _look(self, now: float) -> None:
        """Set ``_active`` if the processes have computed or written files since the last look.

        A MB that is written counts as 0.1 s of computing.
        Raises UserError if a process has printed too much.
        """
        work = 0.0
        for process in running([process.pid for process in self.started], self.folder):
            with suppress(psutil.Error, AttributeError):  # macOS does not count bytes
                work += sum(process.cpu_times()[:2])
                work += process.io_counters().write_chars / 1e7
        if work - self._work > _IDLE_SHARE * (now - self._looked):
            self._active = now
        self._work = work
        self._looked = now
        for process_number in range(len(self.started)):
            if self.log(process_number).stat().st_size > MOST_OUTPUT:
                raise UserError(
                    f"a rank printed more than {MOST_OUTPUT:,} bytes: make it print less"
                )

    def _hang(self, now: float, quiet: float) -> str | None:
        """Return why the run is not going to end, or takes too long; None if it may go on.

        quiet : seconds since the last record.
        """
        limit = self.settings.limit_seconds
        step_seconds = self._step_seconds()
        longest = max(step_seconds, default=0.0)
        since_begin = now - self._began
        most = limit or max(DEFAULT_LIMIT_SECONDS, _QUIET_STEPS * longest)
        if since_begin > most:
            return f"the script did not end within {since_begin:.0f} s"
        may_be_quiet = max(_QUIET_SECONDS, _QUIET_STEPS * longest)
        if limit is None and step_seconds and quiet > may_be_quiet:
            return (
                f"nothing happened for {quiet:.0f} s, after steps of {longest:.1f} s (--timeout "
                "waits longer)"
            )
        if not self._with(CollectiveCall):  # ranks wait for each other only in collectives
            return None
        idle = now - self._active
        if idle > self.settings.idle_seconds or (idle > _CERTAIN_SECONDS and self._calls_differ()):
            return f"no rank made progress for {idle:.0f} s"
        return None

    def _step_seconds(self) -> list[float]:
        """Return the times between the steps of the first process that trains."""
        training = self._with(Step)
        if not training:
            return []
        times = [step.t for step in training[0].of(Step)]
        return [after - before for before, after in pairwise(times)]

    def _calls_differ(self) -> bool:
        """Return whether the ranks are known to wait in different collectives."""
        findings = collectives.check(shared_part(self.reader.recording(hung=True)))
        return any(isinstance(found, Finding) for found in findings)
