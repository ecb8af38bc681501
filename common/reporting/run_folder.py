"""A run's folder, ``<reports>/<part>-<sync>/<time>/``: settings, metrics, checkpoints, report.

``RunFolder`` owns the paths and writes the files. Rank 0 writes all of them, except that each of
the first 64 ranks writes its ``logs_rank{r}.txt``.

Records hold each step and each epoch once, also if the run was killed and resumed. Before a
checkpoint is written, the lines of all steps that it holds are on the disk (``sync``). A resumed
run first removes the lines of later steps and epochs, and lines that are not whole (``cut``),
since it repeats them. run_files.py has the schema of a line.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.profiling.step_timer import SECTIONS
from common.reporting.console import say
from common.reporting.run_files import EpochLine, StepLine
from common.training_engine import EpochReport, StepRecord
from common.utils.atomic_files import (
    append_text,
    check_folder,
    regular_target,
    whole_lines,
    write_atomically,
)
from common.utils.typed_json import decode, encode

_LOGGED_RANKS = 64
_ADVICE = (
    ": free some disk space, or allow writing there; if the run has written a checkpoint, "
    "--resume auto continues from it"
)
_EPOCH_OF_LOG = re.compile(rb"\bEpoch: (\d+),")


def new_run_name(parent: Path) -> str:
    """Create a new folder in ``parent``, named after the time, and return its name.

    Raises OSError if ``parent`` cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    time = datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            (parent / (time + suffix)).mkdir()
            return time + suffix
    raise OSError(f"1000 runs within one second in {parent}")


class RunFolder:
    """The folder ``path`` of one run, created if it is missing.

    Raises UserError if it holds anything but regular files and folders: reading or writing a FIFO
    would block.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.txt"
        self._metrics, self._epochs = path / "metrics.jsonl", path / "epochs.jsonl"
        check_folder(self.checkpoints)
        for entry in path.iterdir():
            if not entry.is_dir() or entry in (self._metrics, self._epochs):
                regular_target(entry)

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log, one line per epoch; os.devnull for rank 64 and above.

        A thousand writers would slow a shared folder down.
        """
        return self.path / f"logs_rank{rank}.txt" if rank < _LOGGED_RANKS else Path(os.devnull)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all; NaN and infinity become null.

        Raises UserError if it cannot be written.
        """
        write_atomically(self.path / name, encode(content, indent=2) + b"\n")

    def append_metrics(self, records: Iterable[StepRecord]) -> None:
        """Append a line for each step to ``metrics.jsonl``."""
        lines = [
            StepLine(
                epoch=record.epoch,
                step=record.step,
                loss=record.loss,
                accuracy=record.accuracy,
                local_loss=record.local_loss,
                local_samples=record.samples,
                learning_rate=record.learning_rate,
                step_seconds=record.step_seconds,
                wait_seconds=record.wait_seconds,
                **{f"{name}_seconds": seconds for name, seconds in record.seconds.items()},
            )
            for record in records
        ]
        _append(self._metrics, lines)

    def append_epoch(self, report: EpochReport) -> None:
        """Append a line to ``epochs.jsonl``."""
        _append(self._epochs, [EpochLine(**asdict(report))])

    def sync(self) -> None:
        """Make the lines written so far survive a crash of the machine."""
        for path in (self._metrics, self._epochs):
            if path.exists():
                append_text(path, "", name=str(path), advice=_ADVICE, sync=True)

    def cut(self, *, step: int, epoch: int) -> None:
        """Remove the lines after ``step`` and ``epoch``, the last ones of a checkpoint.

        Also remove damaged lines, with a warning: the training can go on without them.
        """
        _keep(self._metrics, lambda line, name: decode(line, StepLine, name=name).step <= step)
        _keep(self._epochs, lambda line, name: decode(line, EpochLine, name=name).epoch <= epoch)
        for path in self.path.glob("logs_rank*.txt"):
            _keep(path, lambda line, _: (found := _epoch_of_log(line)) is None or found <= epoch)

    def earlier_steps(self) -> list[StepRecord]:
        """Return the recorded steps, after ``cut``."""
        lines = whole_lines(self._metrics) if self._metrics.exists() else []
        return [_step_record(decode(line, StepLine, name=str(self._metrics))) for line in lines]


def _append(path: Path, lines: Iterable[StepLine | EpochLine]) -> None:
    text = "".join(encode(line).decode() + "\n" for line in lines)
    append_text(path, text, name=str(path), advice=_ADVICE)


def _keep(path: Path, wanted: Callable[[bytes, str], bool]) -> None:
    """Leave only the wanted lines in a file, if it exists.

    ``wanted`` takes a line and its name in messages; it raises UserError if the line is damaged.
    """
    if not path.exists():
        return
    kept, damaged = [], []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            if wanted(line, f"{path}, line {number}"):
                kept.append(line)
        except UserError as error:
            damaged.append(error)
    if damaged:
        more = f", and {len(damaged) - 1} more like it" if len(damaged) > 1 else ""
        say(f"warning: {damaged[0]}: this line{more} is removed from the records")
    content = b"".join(kept)
    if len(content) < path.stat().st_size:
        write_atomically(path, content)


def _epoch_of_log(line: bytes) -> int | None:
    found = _EPOCH_OF_LOG.search(line)
    return int(found[1]) if found else None


def _step_record(line: StepLine) -> StepRecord:
    seconds: dict[str, float] = {name: getattr(line, f"{name}_seconds") for name in SECTIONS}
    return StepRecord(
        epoch=line.epoch,
        step=line.step,
        samples=line.local_samples,
        loss=_nan_for_null(line.loss),
        accuracy=_nan_for_null(line.accuracy),
        local_loss=_nan_for_null(line.local_loss),
        learning_rate=line.learning_rate,
        seconds=seconds,
        step_seconds=sum(seconds.values()) if line.step_seconds is None else line.step_seconds,
        wait_seconds=line.wait_seconds,
    )


def _nan_for_null(value: float | None) -> float:
    return math.nan if value is None else value
