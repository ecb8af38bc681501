"""Read what the probe wrote: the ``Recording`` of one run of a script on a number of ranks.

The format is described in probe/__init__.py. A record that a killed process left unfinished at the
end of its file is left out.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class CodeLine:
    """A line of the audited script."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


def code_line(at: list[Any] | None) -> CodeLine | None:
    """Return the line that a record's "at" names; None if it names none."""
    return None if at is None else CodeLine(*at)


@dataclass
class ProcessRecords:
    """The records of one process, in the order in which it wrote them."""

    pid: int
    records: list[Record]
    _numbers: Numbers

    @cached_property
    def by_kind(self) -> dict[str, list[Record]]:
        """The records of each kind."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            found[record["k"]].append(record)
        return found

    def numbers(self, reference: list[int] | None) -> Numbers | None:
        """Return the numbers that a record refers to; None for null."""
        if reference is None:
            return None
        offset, count = reference
        return self._numbers[offset : offset + count]


@dataclass
class RankRecords(ProcessRecords):
    """The records of the process that trained as one rank.

    Parameters
    ----------
    rank : from its process group; without one, from the command's placeholder or its variables.
    workers : processes that it started, such as its loaders' workers.
    """

    rank: int = 0
    workers: list[ProcessRecords] = field(default_factory=list)

    def of(self, kind: str) -> list[Record]:
        """Return this rank's records of a kind, with those of its workers."""
        return [*self.by_kind[kind], *(one for w in self.workers for one in w.by_kind[kind])]


@dataclass
class Recording:
    """One run of the script.

    Parameters
    ----------
    size : the number of ranks: of the process group, or if there is none, of processes started.
    ranks : by rank; a rank that recorded no step may be missing.
    others : processes that trained nothing: launchers, loaders' workers of ended ranks.
    asked_size : the number that the audit asked for; None if the script chose it.
    global_batch : what ``--global-batch`` says, or None.
    clocks : whether clocks are checked.
    hung : the run did not end and was ended; the ranks' stacks are recorded.
    """

    size: int
    ranks: list[RankRecords]
    others: list[ProcessRecords] = field(default_factory=list)
    asked_size: int | None = None
    global_batch: int | None = None
    clocks: bool = False
    hung: bool = False


def read_process(folder: Path, pid: int) -> ProcessRecords:
    """Return the records of one process."""
    return ProcessRecords(pid, list(_lines(folder / f"{pid}.jsonl")), _load(folder / f"{pid}.f64"))


def _lines(path: Path) -> Iterator[Record]:
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # empty, or cut short when the process was killed
            continue
        if isinstance(record, dict) and "k" in record:
            yield record


def _load(path: Path) -> Numbers:
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content[: len(content) // 8 * 8], dtype=np.float64)


def read_recording(folder: Path, *, asked_size: int | None = None, **facts: Any) -> Recording:
    """Return the recording in a folder: which process was which rank, and what it recorded.

    ``facts`` are fields of ``Recording``.
    """
    processes = {
        int(path.stem): read_process(folder, int(path.stem)) for path in folder.glob("*.jsonl")
    }
    ranks: dict[int, RankRecords] = {}
    for one in sorted(processes.values(), key=lambda one: len(one.by_kind["step"])):
        if (rank := _rank(one)) is not None and (one.by_kind["step"] or one.by_kind["group"]):
            ranks[rank] = RankRecords(one.pid, one.records, one._numbers, rank)
    trained = {one.pid: one for one in ranks.values()}
    others = []
    for one in processes.values():
        parent = next((start["ppid"] for start in one.by_kind["start"]), None)
        if one.pid in trained:
            continue
        if parent in trained:
            trained[parent].workers.append(one)
        else:
            others.append(one)
    sizes = [group["world"] for one in ranks.values() for group in one.by_kind["group"]]
    size = max(sizes, default=len(ranks))
    return Recording(size, [ranks[r] for r in sorted(ranks)], others, asked_size, **facts)


def _rank(one: ProcessRecords) -> int | None:
    """Return which rank a process is; None if nothing tells."""
    for group in one.by_kind["group"]:
        return int(group["rank"])
    for start in one.by_kind["start"]:
        if start["hint"] is not None:
            return int(start["hint"])
        if "RANK" in start["variables"]:
            return int(start["variables"]["RANK"])
    return 0 if one.by_kind["step"] else None
