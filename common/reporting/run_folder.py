"""A run's folder, ``<reports>/<part>-<sync>/<time>/``: settings, metrics, checkpoints, report.

``RunFolder`` owns the paths and writes the files. Rank 0 writes all of them, except that each
rank writes its ``logs_rank{r}.txt``.

Records hold each step and each epoch once, also if the run was killed and resumed. Before a
checkpoint is written, the lines of all steps that it holds are on the disk (``sync``). A resumed
run first removes the lines of later steps and epochs, and lines that are not whole (``cut``),
since it repeats them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.profiling.records import EpochReport, StepRecord
from common.reporting.console import say
from common.utils.atomic_files import (
    append_text,
    check_folder,
    whole_lines,
    write_atomically,
)
from common.utils.typed_json import decode, encode, read_lines

_ADVICE = (
    ": free some disk space, or allow writing there; if the run has written a checkpoint, "
    "--resume auto continues from it"
)
_EPOCH_OF_LOG = re.compile(rb"\bEpoch: (\d+),")


class RunFolder:
    """The folder ``path`` of one run, created if it is missing.

    Raises UserError if something else is at ``path``.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.txt"
        self._metrics = path / "metrics.jsonl"
        self._epochs = path / "epochs.jsonl"

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log, one line per epoch."""
        return self.path / f"logs_rank{rank}.txt"

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all; NaN and infinity become null.

        Raises UserError if it cannot be written.
        """
        write_atomically(self.path / name, encode(content, indent=2) + b"\n")

    def append(self, lines: Sequence[StepRecord] | Sequence[EpochReport]) -> None:
        """Append steps to ``metrics.jsonl``, or epochs to ``epochs.jsonl``: a line for each."""
        path = self._metrics if isinstance(lines[0], StepRecord) else self._epochs
        text = "".join(encode(line).decode() + "\n" for line in lines)
        append_text(path, text, name=str(path), advice=_ADVICE)

    def sync(self) -> None:
        """Make the lines written so far survive a crash of the machine."""
        for path in (self._metrics, self._epochs):
            if path.exists():
                append_text(path, "", name=str(path), advice=_ADVICE, sync=True)

    def cut(self, *, step: int, epoch: int) -> None:
        """Remove the lines after ``step`` and ``epoch``, the last ones of a checkpoint.

        Also remove damaged lines, with a warning: the training can go on without them.
        """
        _keep(self._metrics, lambda line, name: decode(line, StepRecord, name=name).step <= step)
        _keep(self._epochs, lambda line, name: decode(line, EpochReport, name=name).epoch <= epoch)
        for path in self.path.glob("logs_rank*.txt"):
            _keep(path, lambda line, _: _epoch_of_log(line) <= epoch)

    def earlier_steps(self) -> list[StepRecord]:
        """Return the recorded steps, after ``cut``."""
        return read_lines(self._metrics, StepRecord) if self._metrics.exists() else []


def _keep(path: Path, wanted: Callable[[bytes, str], bool]) -> None:
    """Leave only the wanted lines in a file, if it exists.

    ``wanted`` takes a line and its name in messages; it raises UserError if the line is damaged.
    """
    if not path.exists():
        return
    kept = []
    damaged = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            if wanted(line, f"{path}, line {number}"):
                kept.append(line)
        except UserError as error:
            damaged.append(error)
    if damaged:
        more = f", and {len(damaged) - 1} more like it" if len(damaged) > 1 else ""
        say(f"warning: {damaged[0]}: this line{more} is removed from the records")
    write_atomically(path, b"".join(kept))


def _epoch_of_log(line: bytes) -> int:
    """Return the epoch that a line of a log is about; 0: the line may stay."""
    found = _EPOCH_OF_LOG.search(line)
    return int(found[1]) if found else 0
