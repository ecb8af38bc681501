"""A run's folder, ``<reports>/<part>-<sync>/<time>/``: settings, metrics, checkpoints, report.

``RunFolder`` owns the paths and writes the files. Rank 0 writes all of them, except that each of
the first 64 ranks writes its ``logs_rank{r}.txt``.
"""

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
    """Create a folder named after the time in ``parent`` and return its name.

    Two runs never share one. Raises OSError if ``parent`` cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    time = datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        try:
            (parent / (time + suffix)).mkdir()
            return time + suffix
        except FileExistsError:
            continue
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
        """Return the path of one rank's log: a line per epoch.

        Ranks beyond the first 64 log nothing: a thousand writers would slow a shared folder down.
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
        lines = []
        for record in records:
            fields = {
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
            lines.append(json.dumps(_finite(fields)) + "\n")
        _append(self._metrics, "".join(lines))

    def append_epoch(self, report: EpochReport) -> None:
        """Append a line to ``epochs.jsonl``."""
        _append(self._epochs, json.dumps(_finite(asdict(report))) + "\n")

    def earlier_steps(self, last: int) -> list[StepRecord]:
        """Return the recorded steps up to ``last``; remove later ones, which train again."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text(encoding="utf-8").splitlines()
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        kept = [entry for entry in entries if entry["step"] <= last]
        if len(kept) < len(lines):
            text = "".join(json.dumps(entry) + "\n" for entry in kept)
            write_atomically(self._metrics, text.encode())
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


def _append(path: Path, text: str) -> None:
    advice = ": make room, or permit writing there; --resume goes on from the newest checkpoint"
    append_text(path, text, name=str(path), advice=advice)


def _entry(line: str) -> dict[str, Any] | None:
    """Return a line of metrics; None if a full disk or a crash has cut it."""
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
