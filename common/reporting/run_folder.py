"""A run's folder, ``<reports>/<part>-<sync>/<time>/``: settings, metrics, checkpoints, report.

``RunFolder`` owns the paths and writes the files. Rank 0 writes all of them, except that each of
the first 64 ranks writes its ``logs_rank{r}.txt``.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from common.profiling.step_timer import SECTIONS
from common.training_engine import EpochReport, StepRecord
from common.utils.atomic_files import append_text, write_atomically

_LOGGED_RANKS = 64


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
    """The folder ``path`` of one run, created if it is missing."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.txt"
        self._metrics, self._epochs = path / "metrics.jsonl", path / "epochs.jsonl"

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log, one line per epoch; os.devnull for rank 64 and above.

        A thousand writers would slow a shared folder down.
        """
        return self.path / f"logs_rank{rank}.txt" if rank < _LOGGED_RANKS else Path(os.devnull)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all; NaN and infinity become null.

        Raises UserError if it cannot be written.
        """
        text = json.dumps(_finite(content), indent=2, ensure_ascii=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def append_metrics(self, records: Iterable[StepRecord]) -> None:
        """Append a line for each step to ``metrics.jsonl``."""
        entries = [
            {
                "epoch": record.epoch,
                "step": record.step,
                "loss": record.loss,
                "accuracy": record.accuracy,
                "local_loss": record.local_loss,
                "local_samples": record.samples,
                "learning_rate": record.learning_rate,
                **{f"{name}_seconds": seconds for name, seconds in record.seconds.items()},
                "wait_seconds": record.wait_seconds,
            }
            for record in records
        ]
        _append(self._metrics, entries)

    def append_epoch(self, report: EpochReport) -> None:
        """Append a line to ``epochs.jsonl``."""
        _append(self._epochs, [asdict(report)])

    def earlier_steps(self, last: int) -> list[StepRecord]:
        """Return the recorded steps up to ``last``; remove later ones, which the run repeats."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text(encoding="utf-8").splitlines()
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        kept = [entry for entry in entries if entry["step"] <= last]
        if len(kept) < len(lines):
            write_atomically(self._metrics, _json_lines(kept).encode())
        return [
            StepRecord(
                epoch=entry["epoch"],
                step=entry["step"],
                samples=entry["local_samples"],
                loss=_nan_for_null(entry["loss"]),
                accuracy=_nan_for_null(entry["accuracy"]),
                local_loss=_nan_for_null(entry["local_loss"]),
                learning_rate=entry["learning_rate"],
                seconds={name: entry[f"{name}_seconds"] for name in SECTIONS},
                wait_seconds=entry.get("wait_seconds", 0.0),
            )
            for entry in kept
        ]


def _json_lines(entries: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(_finite(entry)) + "\n" for entry in entries)


def _append(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    advice = (
        ": free some disk space, or allow writing there; if the run has written a checkpoint, "
        "--resume auto continues from it"
    )
    append_text(path, _json_lines(entries), name=str(path), advice=advice)


def _entry(line: str) -> dict[str, Any] | None:
    """Return the entry of a line; None if a full disk or a crash has cut the line short."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _nan_for_null(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
