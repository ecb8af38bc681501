"""The program that audits one part in a sandbox: a task from stdin, facts to a file.

It is a process of its own: whatever a submission's records make of it, the others' marks stay as
they are. ``read_facts`` is for the process that has started it.
"""

import os
import resource
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common.utils.typed_json import encode
from lab.audit.audit import audit_script
from lab.audit.cli import STEPS
from lab.audit.command import AuditCommand
from lab.audit.isolation import RunNetwork, record_folder, run_network
from lab.audit.recording import Recording
from lab.audit.report import OWN_FAULT, as_json, write_page
from lab.audit.result import AuditResult
from lab.audit.runner import RunSettings
from lab.grade.sandbox import Limits, sandbox

_MOST_MEMORY = 8 * 2**30
"""Bytes of address space for reading the records."""


class Task(msgspec.Struct, kw_only=True):
    """A part to audit; folders are absolute.

    mounts : the rubric's folders by where they appear. slot : the number of the job.
    sandboxed : False runs the script with the rights of this process.
    """

    words: list[str]
    ranks: list[int]
    submission: str
    script: str
    page: str
    facts: str
    mounts: dict[str, str]
    limits: Limits
    limit_seconds: float
    slot: int
    sandboxed: bool


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a part, without any judgement.

    Parameters
    ----------
    audit : what ``lab audit --json`` writes.
    used : the collectives that its ranks called, and "ddp".
    whole : whether all ranks that trained came to the audit's end.
    doubts : why the records may not be what the probe wrote.
    ended : why the sandbox has ended it; None if it did not.
    """

    audit: dict[str, Any]
    used: list[str]
    whole: bool
    doubts: list[str]
    ended: str | None
    seconds: float


def main() -> int:
    """Audit the part that stdin describes."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.RLIM_INFINITY))
    os.environ.pop("PYTHONPATH", None)  # it led to this program, and is not the script's
    os.chdir(Path(task.script).parent)
    began, ended = time.monotonic(), list[str]()
    settings = RunSettings(steps=STEPS, limit_seconds=task.limit_seconds)
    with record_folder(None) as folder:
        result = audit_script(
            AuditCommand(tuple(task.words)),
            task.ranks,
            folder,
            settings,
            partial(_network, task, ended),
        )
    write_page(Path(task.page), result)
    facts = Facts(
        audit=as_json(result),
        used=sorted(_used(result.recordings)),
        whole=all(
            one.ranks and all(rank.by_kind["cut"] for rank in one.ranks)
            for one in result.recordings or [Recording(0, [])]
        ),
        doubts=_doubts(result),
        ended=ended[0] if ended else None,
        seconds=time.monotonic() - began,
    )
    Path(task.facts).write_bytes(encode(facts))
    return 0


def _network(
    task: Task, ended: list[str], size: int, folder: Path
) -> AbstractContextManager[RunNetwork]:
    cwd = Path(task.script).parent
    if not task.sandboxed:
        return run_network(size, folder, cwd, isolate=None, rate=None)
    return sandbox(
        folder,
        program=task.words[0],
        submission=Path(task.submission),
        cwd=cwd,
        mounts={at: Path(path) for at, path in task.mounts.items()},
        limits=task.limits,
        slot=task.slot,
        ended=ended,
    )


def _used(recordings: Any) -> set[str]:
    ranks = [rank for one in recordings for rank in one.ranks]
    ways = {"ddp" for rank in ranks if rank.by_kind["ddp"]}
    return ways | {str(call["name"]) for rank in ranks for call in rank.by_kind["call"]}


def _doubts(result: AuditResult) -> list[str]:
    """Return what a right script does not do to the probe and its records."""
    doubts = {f"{OWN_FAULT} has failed" for one in result.unknown if OWN_FAULT in one}
    for recording in result.recordings:
        doubts |= set(_doubts_of(recording))
    return sorted(doubts)


def _doubts_of(recording: Recording) -> list[str]:
    double = [one for one in recording.others if one.by_kind["step"]]
    twice = [one for one in recording.processes if len(one.by_kind["start"]) > 1]
    replaced = {
        str(name)
        for one in recording.processes
        for kind in ("cut", "end")
        for record in one.by_kind[kind]
        for name in record.get("replaced", [])
    }
    sentences = {
        "two processes wrote the records of one rank": bool(double),
        "a process's records begin twice": bool(twice),
        f"the script replaced what the audit watches: {', '.join(sorted(replaced)[:5])}": bool(
            replaced
        ),
    }
    return [sentence for sentence, holds in sentences.items() if holds]


if __name__ == "__main__":
    sys.exit(main())
