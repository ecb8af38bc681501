"""Read what the probe wrote: the ``Recording`` of one run of a script on a number of ranks.

The records are described in probe/__init__.py and typed in records.py. The files come from a
stranger's script: they are read with limits, and what no probe has written is one ``UserError``.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.utils.atomic_files import read_regular, whole_lines
from lab.audit.records import (
    AnyRecord,
    Group,
    Record,
    Samples,
    Stack,
    Stands,
    Start,
    Step,
    TorchImported,
    decode_record,
)

Numbers = NDArray[np.float64]
Kind = TypeVar("Kind", bound=AnyRecord)


@dataclass(eq=False)  # compared by identity
class RankRecords:
    """The records of one process, in the order in which it wrote them.

    Parameters
    ----------
    rank : from its process group; without one, from the command's placeholder or its variables.
    """

    pid: int
    records: list[Record]
    _numbers: Numbers = field(default_factory=lambda: np.zeros(0))
    rank: int = 0

    @cached_property
    def _by_kind(self) -> dict[type[AnyRecord], list[Any]]:
        found: dict[type[AnyRecord], list[Any]] = defaultdict(list)
        for record in self.records:
            found[type(record)].append(record)
        return found

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of a kind, e.g. ``of(Step)``."""
        return self._by_kind[kind]

    def add(self, record: Record) -> None:
        """Add the record that the process wrote next."""
        self._by_kind[type(record)].append(record)
        self.records.append(record)

    def numbers(self, samples: Samples | None) -> Numbers:
        """Return the numbers that a record refers to.

        Raises LookupError for None: the probe has failed to sample them.
        """
        if samples is None:
            raise LookupError("no samples were taken")
        first, count = samples
        return self._numbers[first : first + count]


@dataclass
class Recording:
    """One run of the script.

    Parameters
    ----------
    size : the number of ranks: of the process group, or if there is none, of processes started.
    ranks : by rank; a rank that recorded no step may be missing.
    others : processes that trained nothing: launchers, loaders' workers.
    asked_size : the number that the audit asked for; None if the script chose it.
    global_batch : what ``--global-batch`` says, or None.
    clocks : whether clocks are checked.
    hung : the run did not end and was ended; the ranks' stacks are recorded.
    set_aside : a sentence on each model that is left out, see findings/private.py.
    """

    size: int
    ranks: list[RankRecords]
    others: list[RankRecords] = field(default_factory=list)
    asked_size: int | None = None
    global_batch: int | None = None
    clocks: bool = False
    hung: bool = False
    set_aside: Sequence[str] = ()

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of a kind of all ranks, rank by rank."""
        return [record for rank in self.ranks for record in rank.of(kind)]

    @property
    def steps(self) -> int:
        """The most steps that a process recorded."""
        return max((len(process.of(Step)) for process in self.processes), default=0)

    @property
    def processes(self) -> list[RankRecords]:
        """Everything that recorded anything."""
        return [*self.ranks, *self.others]


# Bytes of a process's files. The script of a stranger runs with the right to write there.
MOST_RECORDS = 256 * 2**20
MOST_NUMBERS = 1024 * 2**20


class RecordReader:
    """Reads the records of a run, also while they are still written; ``processes`` by their id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[int, RankRecords] = {}

    def read(self) -> bool:
        """Add the records written since the last call; return whether the script came further.

        Stacks and where a rank waits are no progress. A line that a killed process left unfinished
        is left out.

        Raises UserError for a torch that is too old: the hooks that the probe needs came with 2.0.
        Raises UserError as well, or what ``understood`` of audit.py turns into one, for what no
        probe has written.
        """
        further = False
        for path in list(self._folder.iterdir()):
            if path.suffix != ".jsonl":
                continue
            pid = int(path.stem)
            process = self.processes.setdefault(pid, RankRecords(pid, []))
            lines = whole_lines(path, most_bytes=MOST_RECORDS, follow=False)
            for line in lines[len(process.records) :]:
                record = decode_record(line)
                process.add(record)
                if isinstance(record, TorchImported) and record.version.startswith(("0.", "1.")):
                    raise UserError(
                        f"the script runs with torch {record.version}, and lab audit works with "
                        "torch 2.0 and newer: give the Python of an environment that has one, as "
                        "in lab audit -- /path/to/python main.py"
                    )
                if not isinstance(record, Stack | Stands):
                    further = True
        return further

    def recording(self, **facts: Any) -> Recording:
        """Return what was recorded until now: which process was which rank, and what it wrote.

        ``facts`` are fields of ``Recording``.
        """
        self.read()
        ranks: dict[int, RankRecords] = {}
        # Of several processes of one rank, that with the most steps counts.
        for process in sorted(self.processes.values(), key=lambda process: len(process.of(Step))):
            process._numbers = self._read_numbers(process.pid)
            rank = _find_rank(process)
            takes_part = bool(process.of(Step)) or bool(process.of(Group))
            if rank is not None and takes_part:
                process.rank = rank
                ranks[rank] = process
        others = [process for process in self.processes.values() if process not in ranks.values()]
        sizes = [group.world_size for process in ranks.values() for group in process.of(Group)]
        size = max(sizes, default=len(ranks) or facts.get("asked_size") or 0)
        return Recording(size, [ranks[rank] for rank in sorted(ranks)], others, **facts)

    def _read_numbers(self, pid: int) -> Numbers:
        """Return the whole numbers in a process's file; none without a file."""
        path = self._folder / f"{pid}.f64"
        if not (path.is_symlink() or path.exists()):
            return np.zeros(0)
        content = read_regular(path, most_bytes=MOST_NUMBERS, follow=False)
        whole = len(content) // 8 * 8
        return np.frombuffer(content[:whole], dtype=np.float64)


def _find_rank(process: RankRecords) -> int | None:
    """Return which rank a process is; None if nothing tells.

    Its process group tells, else the audit's own number, else RANK; one that trains alone is 0.
    """
    if groups := process.of(Group):
        return groups[0].rank
    starts = process.of(Start)
    for start in starts:
        if start.hinted_rank is not None:
            return start.hinted_rank
    for start in starts:
        if "RANK" in start.variables:
            return int(start.variables["RANK"])
    return 0 if process.of(Step) else None
