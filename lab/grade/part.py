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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from common.utils.atomic_files import write_atomically
from common.utils.system import libc_function
from common.utils.typed_json import encode
from lab.audit.audit import audit_script
from lab.audit.command import AuditCommand
from lab.audit.findings.endings import ended
from lab.audit.isolation import RunNetwork, record_folder, run_network
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    CollectiveCall,
    Cut,
    DdpBuilt,
    Parameters,
    ProcessEnd,
    Searched,
    Start,
    Step,
)
from lab.audit.report import OWN_FAULT, AuditContent, content_of
from lab.audit.result import AuditResult
from lab.audit.runner import RunSettings
from lab.grade import driven
from lab.grade.demands import Refusal, next_task, refusal_of, shown_command
from lab.grade.facts import Facts, Try
from lab.grade.findings import entries
from lab.grade.judge import DrivenRun, judged, new_run
from lab.grade.ordinary_user import own_copy, user_network
from lab.grade.sandbox import Task, sandbox
from lab.grade.traces import traces

# Bytes of address space for reading the records.
_MOST_MEMORY = 8 * 2**30
# Collectives in the facts, characters of a name, and replaced functions that are named.
_MOST_NAMES = 999
_LONGEST_NAME = 99
# Bytes for each number of the parameters, in all steps: a tenth of what one step sends.
_LEAST_SENT = 0.4
_MOST_REPLACED = 5
_MOST_TRACES = 5
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
        if task.as_user:
            task = own_copy(task, folder)
        outcomes = [_checked(task, folder)] if task.is_driven else _audit_as_demanded(task, folder)
    _write(outcomes, seconds=time.monotonic() - began)
    return 0


@dataclass(frozen=True)
class Outcome:
    """An audit with one command.

    task : as it was run.
    ended : the reason if a sandbox ended the run.
    refusal : how the script refused the command; None if it trained.
    checked : what a driver found; None without one.
    """

    task: Task
    result: AuditResult
    ended: list[str]
    refusal: Refusal | None
    checked: AuditContent | None = None


def _audit_as_demanded(task: Task, folder: Path) -> list[Outcome]:
    """Audit a script; one that refuses its command is tried with what it demands instead.

    Returns an audit for each command; the last one counts.
    """
    began = time.monotonic()
    outcomes = [_audit(task, folder / "demanded")]
    while (refusal := outcomes[-1].refusal) and not outcomes[-1].ended:
        late = time.monotonic() - began > task.limit_seconds or len(outcomes) > _MOST_TRIES
        changed = next_task(outcomes[-1].task, refusal)
        if changed is None or late or not task.may_change:
            break
        if any(_alike(changed, other.task) for other in outcomes):
            break  # two demands undo each other
        outcomes.append(_audit(changed, folder / f"try{len(outcomes)}"))
    ran_alone = outcomes[0].refusal is not None and outcomes[0].refusal.alone
    if ran_alone and outcomes[-1].refusal:
        outcomes.append(outcomes.pop(0))  # what was seen of ranks that train says most
    return outcomes


def _alike(task: Task, other: Task) -> bool:
    """Return whether two tasks run alike, however they came about."""
    return msgspec.structs.replace(task, changes=[]) == msgspec.structs.replace(other, changes=[])


def _checked(task: Task, folder: Path) -> Outcome:
    """Let a driver check a part on each number of ranks, whatever comes of the others."""
    outcomes: list[Outcome] = []
    runs: list[DrivenRun] = []
    for size in task.ranks:
        own = folder / f"driven{size}"
        run = new_run(own / f"{size}-ranks", size)
        one_size = msgspec.structs.replace(task, ranks=[size])
        outcomes.append(_audit(one_size, own, inputs=run.inputs))
        runs.append(run)
    results = [outcome.result for outcome in outcomes]
    result = dataclasses.replace(
        results[-1],
        recordings=[recording for each in results for recording in each.recordings],
        findings=[finding for each in results for finding in each.findings],
        failure=next((each.failure for each in results if each.failure), None),
    )
    ended = [reason for outcome in outcomes for reason in outcome.ended]
    verdicts = dict(zip(task.ranks, judged(task.driver, task.driven_part, runs), strict=True))
    facts = driven.driven_facts(result, verdicts, entries(task.findings))
    return Outcome(task, result, ended, None, facts)


def _audit(task: Task, folder: Path, *, inputs: Sequence[bytes] = ()) -> Outcome:
    """Audit a script with the command of a task.

    inputs : what each rank reads from stdin.
    """
    folder.mkdir()
    os.environ.update(task.environment)
    os.chdir(task.cwd)
    ended: list[str] = []
    steps = driven.STEPS if task.is_driven else None
    settings = RunSettings(steps=steps, limit_seconds=task.limit_seconds, inputs=inputs)
    network = partial(_network, task, ended)
    command = AuditCommand(tuple(task.words))
    result = audit_script(command, task.ranks, folder, settings, network)
    return Outcome(task, result, ended, refusal_of(task, result, folder))


def _network(
    task: Task, ended: list[str], size: int, folder: Path
) -> AbstractContextManager[RunNetwork]:
    """Return where the ranks of a run start.

    ended : gets the reason if a sandbox ends the run.
    """
    if task.sandboxed:
        return sandbox(task, folder, ended)
    if task.as_user:
        return user_network(task, size, folder)
    for at, path in task.mounts.items():
        place = Path(os.path.normpath(task.cwd / at))
        if place.is_relative_to(task.submission) and not os.path.lexists(place):
            place.symlink_to(path)
    for made in task.folders:
        Path(made).mkdir(parents=True, exist_ok=True)
    return run_network(size, folder, task.cwd, isolate=None, rate=None)


# --- what was seen ---


def _write(outcomes: Sequence[Outcome], *, seconds: float) -> None:
    """Write the facts with the whole audit in them; its page is written once it has a mark."""
    *before, last = outcomes
    task = last.task
    result = last.result
    ranks = [rank for recording in result.recordings for rank in recording.ranks]
    facts = Facts(
        key=task.key,
        audit=last.checked or content_of(result),
        used=_used(ranks),
        whole=bool(ranks) and all(rank.of(Cut) or ended(rank) for rank in ranks),
        doubts=[*_doubts(result, last.ended), *islice(traces(Path(task.submission)), _MOST_TRACES)],
        seconds=seconds,
        script=task.script,
        command=shown_command(task),
        changes=task.changes,
        refused=last.refusal is not None,
        tries=[Try(shown_command(other.task), other.result.headline) for other in before],
    )
    # Nobody finds the copy of the submission again.
    write_atomically(
        Path(task.facts), encode(facts, indent=1).replace(f"{task.submission}/".encode(), b"")
    )


def _used(ranks: Sequence[RankRecords]) -> list[str]:
    """Return the collectives that the ranks called, and "ddp" if one used it.

    Not those whose tensors are next to nothing beside the parameters: no gradients went by them.
    """
    used: set[str] = set()
    for rank in ranks:
        rows = [row for record in rank.of(Parameters) for row in record.rows]
        least = _LEAST_SENT * sum(row.numel for row in rows)
        sent: defaultdict[str, float] = defaultdict(float)
        for call in rank.of(CollectiveCall):
            # Longer names, and more, come from no probe. Without tensors: a barrier, an object.
            sent[call.name[:_LONGEST_NAME]] += least if call.dtype is None else call.nbytes
        used.update(name for name, nbytes in sent.items() if nbytes >= least)
    if any(rank.of(DdpBuilt) for rank in ranks):
        used.add("ddp")
    return sorted(used)[:_MOST_NAMES]


def _doubts(result: AuditResult, ended: Sequence[str]) -> list[str]:
    """Return what a right script does not do to the sandbox, the probe and its records."""
    if ended:
        return [f"it was ended: {ended[0]}"]
    doubts: set[str] = set()
    if any(OWN_FAULT in sentence for row in result.properties for sentence in row.said):
        doubts.add(f"{OWN_FAULT} has failed")
    for recording in result.recordings:
        doubts.update(_doubts_of(recording))
    return sorted(doubts)


def _searches(processes: Sequence[RankRecords]) -> Iterator[str]:
    """Yield a sentence for each line that looked for the probe's objects."""
    for process in processes:
        for search in process.of(Searched):
            yield f"{search.at or 'the script'} looks for the audit: {search.what}"


def _doubts_of(recording: Recording) -> Iterator[str]:
    """Yield what looks forged or disturbed in the records of one run."""
    processes = recording.processes
    if any(other.of(Step) for other in recording.others):
        yield "two processes wrote the records of one rank"
    if any(process.records and not isinstance(process.records[0], Start) for process in processes):
        yield "records that no probe began"
    if any(len(process.of(Start)) > 1 for process in processes):
        yield "the records of a process begin twice"
    yield from _searches(processes)
    replaced: set[str] = set()
    for process in processes:
        for end in process.of(ProcessEnd):
            replaced.update(end.replaced)
    if replaced:
        names = ", ".join(sorted(replaced)[:_MOST_REPLACED])
        yield f"the script replaced what the audit watches: {names}"


if __name__ == "__main__":
    sys.exit(main())
