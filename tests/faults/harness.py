"""One fault against one run: start it, strike in a phase, check what was promised, resume it.

``run_trial`` does all of this for a row of the table in test_table_of_faults.py. A victim is held
in the phase (tests/helpers/hurt.py) while the test strikes from outside with a real signal, a full
disk or a limit on the size of files.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.checkpoint import checkpoints_by_age, load_checkpoint
from common.utils.hashing import digest
from tests.helpers import ROOT, Started, free_port, user_environment, wait_until
from tests.helpers.full_disk import on_small_disk
from tests.helpers.processes import running_in
from tests.helpers.stage import GRACE, HURT, NOBODY, PATIENT, assert_equal_runs, hidden_files

EPOCHS = 3
TIMEOUT = 5
"""``--timeout`` in seconds for runs in which a rank is lost without a word."""
PAUSE_SECONDS = 1.0
SMALL_FILE = 5120
WAYS = {"all_reduce": "PartTwo", "gather_scatter": "PartTwo", "ddp": "PartThree"}
MOMENTS = {
    "start": "importing",
    "meeting": "meeting",
    "data": "loading",
    "training": "forward",
    "collective": "collective",
    "epoch": "epoch",
    "checkpoint": "writing",
    "rename": "renaming",
    "renamed": "renamed",
    "evaluation": "evaluation",
    "end": "end",
}
"""The phases in the order of a run, and what hurt.py calls them."""


@dataclass(frozen=True)
class Fault:
    """What happens to rank ``victim`` of ``ranks`` in a phase."""

    action: str
    phase: str
    ranks: int = 1
    victim: int = 0
    way: str = "all_reduce"

    def __str__(self):
        which = f"rank{self.victim}of{self.ranks}" if self.ranks > 1 else "alone"
        way = "" if self.way == "all_reduce" else f"-{self.way}"
        return f"{self.action}-{self.phase}-{which}{way}".replace(" ", "-")

    @property
    def moment(self):
        """The moment of hurt.py; a rank that writes no checkpoint waits for the one that does."""
        return "waiting" if self.phase == "checkpoint" and self.victim else MOMENTS[self.phase]


@dataclass(frozen=True)
class Promise:
    """How a run ends: exit status and last message of the victim and of the other rank.

    Parameters
    ----------
    kept : epochs whose checkpoints must be there.
    """

    victim: tuple[int, str]
    other: tuple[int, str]
    kept: tuple[int, ...] = ()


@dataclass
class Run:
    """The processes of one run of tiny steps, and where it writes."""

    folder: Path
    images: Path
    fault: Fault
    processes: list[Started] = field(default_factory=list)
    disk: Path | None = None

    @property
    def victim(self):
        """The process that is hit."""
        return self.processes[self.fault.victim]

    @property
    def output(self):
        """The run's folder."""
        part = "PartOne-none" if self.fault.ranks == 1 else f"{self._part}-{self.fault.way}"
        return self.folder / "out" / part / "run"

    @property
    def _part(self):
        return "PartOne" if self.fault.ranks == 1 else WAYS[self.fault.way]

    def start(self, *flags, held=False, timeout=PATIENT):
        """Start all ranks; with ``held`` the victim waits in the fault's phase."""
        fault, port = self.fault, free_port()
        hurt = (fault.victim, fault.moment, "hold") if held else (NOBODY, "", "")
        small = held and fault.action == "full disk"
        (self.folder / "out").mkdir(exist_ok=True)
        words = ["--model", "wide" if fault.phase == "collective" else "tiny"]
        words += f"--threads 1 --batch-size 12 --epochs {EPOCHS} --run-name run".split()
        words += ["--dataset", "folder", "--data-dir", self.images]
        words += ["--output-dir", self.folder / "out"]
        if fault.ranks > 1:
            words += f"--master-ip 127.0.0.1 --master-port {port} --timeout {timeout}".split()
            words += ["--meeting-timeout", timeout, "--num-nodes", fault.ranks]
        if self._part == "PartTwo":
            words += ["--sync", fault.way]
        self.processes = []
        for rank in range(fault.ranks):
            command = [sys.executable, HURT, *hurt, ROOT / self._part / "main.py", *words]
            command += ["--rank", rank] if fault.ranks > 1 else []
            disk = on_small_disk("400k") if small and rank == fault.victim else ()
            command = [*disk, *map(str, [*command, *flags])]
            how = {"cwd": self.folder, "env": user_environment(TMPDIR=str(self.folder))}
            self.processes.append(Started(command, **how, forked=not disk))

    def let_go(self):
        """Let the victim continue."""
        (self.folder / "go").touch()
        (self.folder / "go again").touch()

    def end(self):
        """Wait for all ranks, and check that no process of the run is left."""
        ends = [one.end(timeout_seconds=PATIENT + GRACE) for one in self.processes]
        wait_until(lambda: running_in(self.folder) == [], "the end of all processes")
        return ends


def train(folder, images, fault):
    """Train undisturbed as the fault's run would, and return the run's folder."""
    run = Run(folder, images, fault)
    run.start()
    for ended in run.end():
        assert ended.status == 0, ended
    return run.output


def run_trial(fault, promise, folder, images, reference):
    """Start a run, strike, and check the promise; resume it, and compare it with ``reference``."""
    run = Run(folder, images, fault)
    waits = fault.action == "stop" or fault.phase in ("start", "meeting")
    patient = fault.action in ("pause", "full disk", "small files") or not waits
    timeout = PATIENT if patient else TIMEOUT
    if fault.phase == "collective":
        # In gather and scatter Gloo may notice a killed rank only at the group's timeout.
        timeout = 3 * TIMEOUT
    run.start(held=True, timeout=timeout)
    run.victim.wait_for("held now")
    ACTIONS[fault.action](run)
    struck = time.monotonic()
    if fault.phase == "meeting" and "interrupt" in fault.action:  # a thread of the rank is held
        wait_until(lambda: run.victim.process.poll() is not None, "the end of the rank")
    run.let_go()
    ends = run.end()
    if fault.phase not in ("start", "meeting"):  # from there the whole run may follow
        assert time.monotonic() - struck < 2 * TIMEOUT + GRACE, "too late"
    left = {path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")}
    assert left <= {"out", "go", "go again"}, "temporary files, other than torch's cache"
    for rank, ended in enumerate(ends):
        status, pattern = promise.victim if rank == fault.victim else promise.other
        assert ended.status == status, (rank, ended)
        assert re.search(pattern, ended.err), (rank, pattern, ended)
        assert "Traceback" not in ended.err, (rank, ended)
        assert ended.status in (0, -signal.SIGKILL, -signal.SIGTERM) or ended.err.strip()
    if run.disk is not None:
        shutil.copytree(run.disk, folder / "out", dirs_exist_ok=True)
        (folder / "out" / "filler").unlink()
    _check_files(run, promise, reference, status=ends[0].status)
    if any(ended.status for ended in ends):
        run.start("--resume", "auto")
        for ended in run.end():
            assert ended.status == 0, ended
    averaged = fault.action == "terminate" and fault.ranks > 1
    assert_equal_runs(run.output, reference, averaged_within_epoch=averaged)


def _check_files(run, promise, reference, *, status):
    """Check that whatever has a final name is whole, and that no result is there too early.

    status : of rank 0, which writes.
    """
    saved = checkpoints_by_age(run.output / "checkpoints")
    for path in saved:
        undisturbed = reference / "checkpoints" / path.name
        if undisturbed.exists():  # not the one that SIGTERM saved in the middle of an epoch
            assert digest(load_checkpoint(path)) == digest(load_checkpoint(undisturbed)), path
        else:
            load_checkpoint(path)
    names = {path.name for path in saved}
    assert {f"Epoch_{epoch}.pt" for epoch in promise.kept} <= names, names
    assert (run.output / "summary.json").exists() == (status == 0)
    if status >= 0:  # a signal leaves the lock file, which is free, and what was being written
        assert hidden_files(run.folder / "out") == []


# --- the actions ---


def _kill(run):
    run.victim.send(signal.SIGKILL)


def _terminate(run):
    run.victim.send(signal.SIGTERM)
    _wait_until_delivered(run.victim)


def _interrupt(run):
    run.victim.send(signal.SIGINT)
    _wait_until_delivered(run.victim)


def _interrupt_twice(run):
    """Interrupt, and once more while the rank cleans up."""
    run.victim.send(signal.SIGINT)
    wait_until(
        lambda: "held again" in run.victim.read_out() or run.victim.process.poll() is not None,
        "the end of the interrupted rank",
    )
    run.victim.send(signal.SIGINT)
    _wait_until_delivered(run.victim)


def _stop(run):
    """Stop the victim until the other rank has given up."""
    run.victim.send(signal.SIGSTOP)
    others = [one for one in run.processes if one is not run.victim]
    run.let_go()
    for one in others:
        one.end(timeout_seconds=2 * TIMEOUT + GRACE)
    if not others:
        time.sleep(PAUSE_SECONDS)  # nobody waits for a single rank
    run.victim.send(signal.SIGCONT)


def _pause(run):
    run.victim.send(signal.SIGSTOP)
    run.let_go()
    time.sleep(PAUSE_SECONDS)  # less than the timeout
    run.victim.send(signal.SIGCONT)


def _fill_disk(run):
    """Fill the victim's disk, and keep it open: it vanishes with the last process that uses it."""
    disk = os.open(f"/proc/{run.victim.process.pid}/root{run.folder}/out", os.O_DIRECTORY)
    run.disk = Path(f"/proc/self/fd/{disk}")
    with (run.disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def _limit_files(run):
    limit = (SMALL_FILE, SMALL_FILE)
    resource.prlimit(run.victim.process.pid, resource.RLIMIT_FSIZE, limit)


ACTIONS: dict[str, Callable[[Run], None]] = {
    "kill": _kill,
    "stop": _stop,
    "pause": _pause,
    "interrupt": _interrupt,
    "interrupt twice": _interrupt_twice,
    "terminate": _terminate,
    "full disk": _fill_disk,
    "small files": _limit_files,
}


def _wait_until_delivered(one):
    """Wait until the process has taken every signal sent to it, or has ended."""

    def pending():
        try:
            status = Path(f"/proc/{one.process.pid}/status").read_text()
        except OSError:
            return 0
        return sum(int(word, 16) for word in re.findall(r"(?:Sig|Shd)Pnd:\t(\w+)", status))

    wait_until(lambda: not pending() or one.process.poll() is not None, "the signal's delivery")
