"""Read what the probe wrote: the ``Recording`` of one run of a script on a number of ranks.

The format is described in probe/__init__.py. The files come from a stranger's script: they are read
with limits, and what no probe has written is one ``UserError``.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.utils.atomic_files import read_regular, whole_lines

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
    def by_kind(self) -> dict[str, list[Record]]:
        """The records of each kind."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            found[record["k"]].append(record)
        return found

    def numbers(self, reference: list[int] | None) -> Numbers | None:
        """Return the numbers that a record refers to by their place and count; None for null."""
        return None if reference is None else self._numbers[reference[0] : sum(reference)]


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
    """

    size: int
    ranks: list[RankRecords]
    others: list[RankRecords] = field(default_factory=list)
    asked_size: int | None = None
    global_batch: int | None = None
    clocks: bool = False
    hung: bool = False

    @property
    def steps(self) -> int:
        """The most steps that a process recorded."""
        return max((len(one.by_kind["step"]) for one in self.processes), default=0)

    @property
    def processes(self) -> list[RankRecords]:
        """Everything that recorded anything."""
        return [*self.ranks, *self.others]


# Bytes of a process's files. The script of a stranger runs with the right to write there.
MOST_RECORDS, MOST_NUMBERS = 256 * 2**20, 1024 * 2**20


class RecordReader:
    """Reads the records of a run, also while they are still written; ``processes`` by their id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[int, RankRecords] = {}

    def read(self) -> bool:
        """Add the records written since the last call; return whether the script came further.

        A line that a killed process left unfinished is left out. Raises UserError for a torch that
        is too old: the hooks that the probe needs came with 2.0. Raises UserError as well, or what
        ``understood`` of audit.py turns into one, for what no probe has written.
        """
        further = False
        for path in [one for one in self._folder.iterdir() if one.suffix == ".jsonl"]:
            pid = int(path.stem)
            process = self.processes.setdefault(pid, RankRecords(pid, []))
            for line in whole_lines(path, most_bytes=MOST_RECORDS, follow=False)[
                len(process.records) :
            ]:
                record = json.loads(line)
                process.by_kind[record["k"]].append(record)
                process.records.append(record)
                further |= record["k"] not in ("stack", "stands")
                if record["k"] == "torch" and record["version"].startswith(("0.", "1.")):
                    raise UserError(
                        f"the script runs with torch {record['version']}, and lab audit works with "
                        "torch 2.0 and newer: give the Python of an environment that has one, as "
                        "in lab audit -- /path/to/python main.py"
                    )
        return further

    def recording(self, **facts: Any) -> Recording:
        """Return what was recorded until now: which process was which rank, and what it wrote.

        ``facts`` are fields of ``Recording``.
        """
        self.read()
        ranks: dict[int, RankRecords] = {}
        for one in sorted(self.processes.values(), key=lambda one: len(one.by_kind["step"])):
            path = self._folder / f"{one.pid}.f64"
            content = (
                read_regular(path, most_bytes=MOST_NUMBERS, follow=False)
                if path.is_symlink() or path.exists()
                else b""
            )
            one._numbers = np.frombuffer(content[: len(content) // 8 * 8], dtype=np.float64)
            rank = _rank(one)
            if rank is not None and (one.by_kind["step"] or one.by_kind["group"]):
                one.rank, ranks[rank] = rank, one
        others = [one for one in self.processes.values() if one not in ranks.values()]
        sizes = [group["world"] for one in ranks.values() for group in one.by_kind["group"]]
        size = max(sizes, default=len(ranks))
        return Recording(size, [ranks[r] for r in sorted(ranks)], others, **facts)


def _rank(one: RankRecords) -> int | None:
    """Return which rank a process is; None if nothing tells."""
    starts = one.by_kind["start"]
    said = [
        *(group["rank"] for group in one.by_kind["group"]),
        *(start["hint"] for start in starts),
        *(start["variables"].get("RANK") for start in starts),
        *(0 for _ in one.by_kind["step"]),
    ]
    return next((int(rank) for rank in said if rank is not None), None)
