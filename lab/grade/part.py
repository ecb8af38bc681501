"""The program that audits one part in a sandbox: a task from stdin, facts to a file.

It is a process of its own: whatever a submission's records make of it, the others' marks stay as
they are.
"""

import os
import platform
import resource
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common.utils.atomic_files import write_atomically
from common.utils.system import libc_function
from common.utils.typed_json import encode
from lab.audit.audit import audit_script
from lab.audit.cli import STEPS
from lab.audit.command import AuditCommand
from lab.audit.isolation import RunNetwork, record_folder, run_network
from lab.audit.recording import Recording
from lab.audit.records import CollectiveCall, Cut, DdpBuilt, Start, Step
from lab.audit.report import OWN_FAULT, as_json, write_page
from lab.audit.result import AuditResult
from lab.audit.runner import RunSettings
from lab.grade.sandbox import Task, sandbox

# Bytes of address space for reading the records.
_MOST_MEMORY = 8 * 2**30
# <asm/unistd.h> and <linux/keyctl.h>
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a part, without any judgement.

    Parameters
    ----------
    key : of all that they follow from.
    audit : what ``lab audit --json`` writes.
    used : the collectives that its ranks called, and "ddp".
    whole : whether all ranks that trained came to the audit's end.
    doubts : why the records may not be what the probe wrote, or are not all.
    """

    key: str
    audit: dict[str, Any]
    used: list[str]
    whole: bool
    doubts: list[str]
    seconds: float


def main() -> int:
    """Audit the part that stdin describes."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    if syscall := libc_function("syscall"):  # strangers inherit the keyring, which may hold tickets
        syscall(_KEYCTL.get(platform.machine(), -1), _JOIN_SESSION_KEYRING, None)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.RLIM_INFINITY))
    os.environ.pop("PYTHONPATH", None)  # it led to this program, and is not the script's
    os.chdir(task.cwd)
    began, ended = time.monotonic(), list[str]()
    settings = RunSettings(steps=STEPS, limit_seconds=task.limit_seconds)
    command, network = AuditCommand(tuple(task.words)), partial(_network, task, ended)
    with record_folder(None) as folder:
        result = audit_script(command, task.ranks, folder, settings, network)
    ranks = [rank for one in result.recordings for rank in one.ranks]
    calls = {call.name for rank in ranks for call in rank.of(CollectiveCall)}
    facts = Facts(
        key=task.key,
        audit=as_json(result),
        # Longer names, and more, come from no probe.
        used=sorted({one[:99] for one in calls} | {"ddp" for rank in ranks if rank.of(DdpBuilt)})[
            :999
        ],
        whole=bool(ranks) and all(rank.of(Cut) for rank in ranks),
        doubts=[f"it was ended: it {ended[0]}"] if ended else _doubts(result),
        seconds=time.monotonic() - began,
    )
    write_page(Path(task.facts).with_suffix(".html"), result)
    # Nobody finds the copy of the submission again.
    text = encode(facts, indent=1).replace(f"{task.submission}/".encode(), b"")
    write_atomically(Path(task.facts), text)
    return 0


def _network(
    task: Task, ended: list[str], size: int, folder: Path
) -> AbstractContextManager[RunNetwork]:
    if task.sandboxed:
        return sandbox(task, folder, ended)
    for at, path in task.mounts.items():
        place = Path(os.path.normpath(task.cwd / at))
        if place.is_relative_to(task.submission) and not os.path.lexists(place):
            place.symlink_to(path)
    return run_network(size, folder, task.cwd, isolate=None, rate=None)


def _doubts(result: AuditResult) -> list[str]:
    """Return what a right script does not do to the probe and its records."""
    doubts = {OWN_FAULT + " has failed" for one in result.unknown if OWN_FAULT in one}
    for recording in result.recordings:
        doubts |= _doubts_of(recording)
    return sorted(doubts)


def _doubts_of(recording: Recording) -> set[str]:
    cuts = [record for one in recording.processes for record in one.of(Cut)]
    replaced = sorted({name for record in cuts for name in record.replaced})
    sentences = {
        "two processes wrote the records of one rank": any(
            one.of(Step) for one in recording.others
        ),
        "records that no probe began": any(
            one.records and not isinstance(one.records[0], Start) for one in recording.processes
        ),
        "the records of a process begin twice": any(
            len(one.of(Start)) > 1 for one in recording.processes
        ),
        f"the script replaced what the audit watches: {', '.join(replaced[:5])}": bool(replaced),
    }
    return {sentence for sentence, holds in sentences.items() if holds}


if __name__ == "__main__":
    sys.exit(main())
