"""The program that audits one part in a sandbox: a task from stdin, facts to a file.

It is a process of its own: whatever a submission's records make of it, the others' marks stay as
they are.
"""

import dataclasses
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from common.utils.atomic_files import write_atomically
from common.utils.system import libc_function
from common.utils.typed_json import convert, encode
from lab.audit.audit import audit_script
from lab.audit.cli import STEPS
from lab.audit.command import AuditCommand
from lab.audit.isolation import RunNetwork, record_folder, run_network
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import CollectiveCall, Cut, DdpBuilt, Start, Step
from lab.audit.report import OWN_FAULT, as_json
from lab.audit.result import AuditResult
from lab.audit.runner import RunSettings
from lab.grade import driven
from lab.grade.demands import next_task, refusal_of, shown_command
from lab.grade.facts import AuditFacts, Facts, Try
from lab.grade.sandbox import Task, sandbox

# Bytes of address space for reading the records.
_MOST_MEMORY = 8 * 2**30
# Collectives in the facts, characters of a name, and replaced functions that are named.
_MOST_NAMES = 999
_LONGEST_NAME = 99
_MOST_REPLACED = 5
# Other commands for a script that refuses the demanded one; they begin within its time limit.
_MOST_TRIES = 7
# <asm/unistd.h> and <linux/keyctl.h>
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1


def main() -> int:
    """Audit the part that stdin describes."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    if syscall := libc_function("syscall"):  # strangers inherit the keyring, which may hold tickets
        syscall(_KEYCTL.get(platform.machine(), -1), _JOIN_SESSION_KEYRING, None)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.RLIM_INFINITY))
    os.environ.pop("PYTHONPATH", None)  # it led to this program, and is not the script's
    began = time.monotonic()
    with record_folder(None) as folder:
        outcome = _audit_as_demanded(task, folder)
    _write(outcome, seconds=time.monotonic() - began)
    return 0


@dataclass(frozen=True)
class Outcome:
    """The audit that counts.

    task : as it was run at last.
    ended : the reason if a sandbox ended the run.
    tries : the commands before, which the script refused.
    checked : what a driver found; None without one.
    """

    task: Task
    result: AuditResult
    ended: list[str]
    tries: list[Try]
    checked: AuditFacts | None = None


def _audit_as_demanded(task: Task, folder: Path) -> Outcome:
    """Audit a script; one that refuses its command is tried with what it demands instead."""
    began = time.monotonic()
    tries: list[Try] = []
    while True:
        ended: list[str] = []
        own = folder / f"try{len(tries)}"
        own.mkdir()
        if task.is_driven:
            return _checked(task, own, ended)
        result = _audit(task, own, ended)
        outcome = Outcome(task, result, ended, tries)
        late = time.monotonic() - began > task.limit_seconds or len(tries) == _MOST_TRIES
        refusal = refusal_of(task, result, own)
        if refusal is None or ended or late or not task.may_change:
            return outcome
        changed = next_task(task, refusal)
        if changed is None:
            return outcome
        tries.append(Try(shown_command(task), result.headline))
        task = changed


def _checked(task: Task, folder: Path, ended: list[str]) -> Outcome:
    """Let a driver check a part on each number of ranks, whatever comes of the others."""
    runs: list[AuditResult] = []
    for size in task.ranks:
        runs.append(_audit(msgspec.structs.replace(task, ranks=[size]), folder, ended))
    result = dataclasses.replace(
        runs[-1],
        recordings=[recording for run in runs for recording in run.recordings],
        findings=[finding for run in runs for finding in run.findings],
        failure=next((run.failure for run in runs if run.failure), None),
    )
    return Outcome(task, result, ended, [], driven.driven_facts(result, folder, task.ranks))


def _audit(task: Task, folder: Path, ended: list[str]) -> AuditResult:
    """Audit a script with the command of a task.

    ended : gets the reason if a sandbox ends a run.
    """
    os.environ.update(task.environment)
    os.chdir(task.cwd)
    steps = driven.STEPS if task.is_driven else STEPS
    settings = RunSettings(steps=steps, limit_seconds=task.limit_seconds)
    network = partial(_network, task, ended)
    return audit_script(AuditCommand(tuple(task.words)), task.ranks, folder, settings, network)


def _network(
    task: Task, ended: list[str], size: int, folder: Path
) -> AbstractContextManager[RunNetwork]:
    """Return where the ranks of a run start.

    ended : gets the reason if a sandbox ends the run.
    """
    if task.sandboxed:
        return sandbox(task, folder, ended)
    for at, path in task.mounts.items():
        place = Path(os.path.normpath(task.cwd / at))
        if place.is_relative_to(task.submission) and not os.path.lexists(place):
            place.symlink_to(path)
    for made in task.folders:
        Path(made).mkdir(parents=True, exist_ok=True)
    return run_network(size, folder, task.cwd, isolate=None, rate=None)


# --- what was seen ---


def _write(outcome: Outcome, *, seconds: float) -> None:
    """Write the facts with the whole audit in them; its page is written once it has a mark.

    What a driver found has no page: the audit's would speak of the driver.
    """
    task, result = outcome.task, outcome.result
    audit = msgspec.to_builtins(outcome.checked) if outcome.checked else as_json(result)
    ranks = [rank for recording in result.recordings for rank in recording.ranks]
    facts = Facts(
        key=task.key,
        audit=convert(audit, AuditFacts, name="what the audit found"),
        used=_used(ranks),
        whole=bool(ranks) and all(rank.of(Cut) for rank in ranks),
        doubts=_doubts(result, outcome.ended),
        seconds=seconds,
        script=task.script,
        command=shown_command(task),
        changes=task.changes,
        tries=outcome.tries,
    )
    text = encode(msgspec.to_builtins(facts) | {"audit": audit}, indent=1)
    # Nobody finds the copy of the submission again.
    write_atomically(Path(task.facts), text.replace(f"{task.submission}/".encode(), b""))


def _used(ranks: Sequence[RankRecords]) -> list[str]:
    """Return the collectives that the ranks called, and "ddp" if one used it."""
    # Longer names, and more, come from no probe.
    used = {call.name[:_LONGEST_NAME] for rank in ranks for call in rank.of(CollectiveCall)}
    if any(rank.of(DdpBuilt) for rank in ranks):
        used.add("ddp")
    return sorted(used)[:_MOST_NAMES]


def _doubts(result: AuditResult, ended: Sequence[str]) -> list[str]:
    """Return what a right script does not do to the sandbox, the probe and its records."""
    if ended:
        return [f"it was ended: it {ended[0]}"]
    doubts: set[str] = set()
    if any(OWN_FAULT in sentence for sentence in result.unknown):
        doubts.add(f"{OWN_FAULT} has failed")
    for recording in result.recordings:
        doubts.update(_doubts_of(recording))
    return sorted(doubts)


def _doubts_of(recording: Recording) -> Iterator[str]:
    """Yield what looks forged or disturbed in the records of one run."""
    processes = recording.processes
    if any(other.of(Step) for other in recording.others):
        yield "two processes wrote the records of one rank"
    if any(process.records and not isinstance(process.records[0], Start) for process in processes):
        yield "records that no probe began"
    if any(len(process.of(Start)) > 1 for process in processes):
        yield "the records of a process begin twice"
    replaced: set[str] = set()
    for process in processes:
        for cut in process.of(Cut):
            replaced.update(cut.replaced)
    if replaced:
        names = ", ".join(sorted(replaced)[:_MOST_REPLACED])
        yield f"the script replaced what the audit watches: {names}"


if __name__ == "__main__":
    sys.exit(main())
