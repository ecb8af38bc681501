"""Read, check and write ``results.json``, which holds what a comparison measured.

A comparison has cells (a strategy on a number of nodes), a cell has repeats (runs), a repeat has a
row for each rank.

    format, kind ("compare" or "report"), created, finished, emulated
    settings      what was asked for: dataset, model, batch_size, steps, nodes, sync, ...
    environment   of the machine, as in a run's environment.json
    warnings      what a reader must know first
    differences   why runs cannot be compared (only from ``lab report``)
    prediction    null, or what was predicted before the first run: made, calibration, cells by id
    cells         id, sync, nodes, rate, batch_size, exact, group, oversubscribed,
                  status (done, partial, failed, pending), message, median, interval,
                  repeats (folder, seed, status, started, ranks, losses, test_accuracy,
                  seconds_to_accuracy)
    groups        settings of each group by its number, as a text (only from ``lab report``)
    plan          of a comparison whose runs others start (job_plan.py): code (digests by file),
                  runs (cell and repeat), to_do (their numbers)
    timelines     by cell: one step, as in a run's timeline.json

docs/comparing.md explains it for readers. All values are seconds and bytes. ``median`` is over the
repeats of the mean over the ranks. ``interval`` is the 95 % interval of the mean over repeats by
Student's t, [null, null] for a single repeat. Cells of different ``group`` are not comparable.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.grouping import grouped
from lab.compare.outcomes import read_json

V = TypeVar("V")

FORMAT = 1
TIMES = ("step", "data", "forward", "backward", "sync", "update", "wait", "wire")
_PARTS_OF_RESULTS = {
    "format": int,
    "kind": str,
    "created": str,
    "finished": bool,
    "settings": dict,
    "environment": dict,
    "warnings": list,
    "cells": list,
    "timelines": dict,
}
_PARTS_OF_CELL = {
    "id": str,
    "sync": str,
    "nodes": int,
    "status": str,
    "repeats": list,
    "group": int,
}


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a ``results.json``.

    Raises UserError with the file's name if it is cut, of another program or of another format.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is cut off, or not a results.json; the file is "
            "unchanged"
        ) from error
    if not isinstance(results, dict) or "format" not in results:
        raise UserError(f"{path} is no results.json of lab compare; the file is unchanged")
    if results["format"] != FORMAT:
        raise UserError(
            f"{path} has format {results['format']!r}, this version reads {FORMAT}: use the "
            "version that wrote it; the file is unchanged"
        )
    _check_parts(path, results, _PARTS_OF_RESULTS, "")
    for index, cell in enumerate(results["cells"]):
        _check_parts(path, cell, _PARTS_OF_CELL, f"cells[{index}].")
    if "plan" in results:
        _check_parts(path, results["plan"], {"code": dict, "runs": list}, "plan.")
    return results


def _check_parts(path: Path, content: Any, parts: Mapping[str, type], prefix: str) -> None:
    for name, kind in parts.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise UserError(
                f"{path}: {prefix}{name} is missing or no {kind.__name__}; the file is unchanged"
            )


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results.json`` completely or not at all."""
    write_atomically(
        path, (json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    )


def take_timeline(
    results: dict[str, Any], cell: Mapping[str, Any], outcome: dict[str, Any], folder: Path
) -> None:
    """Put the timeline of a cell's first repeat that has one into ``results``.

    Called for every finished run by lab compare (runner), its job plans (job_results) and lab
    report (imported_runs); it also sets ``started`` of the outcome.
    """
    if outcome["status"] == "done" and "started" not in outcome:
        outcome["started"] = _started(folder / outcome["folder"])
    timeline = folder / outcome["folder"] / "timeline.json"
    if outcome["status"] == "done" and cell["id"] not in results["timelines"] and timeline.exists():
        results["timelines"][cell["id"]] = read_json(timeline)


def _started(run: Path) -> str | None:
    """Return when a run started, in ISO format: rank 0 writes config.json before the first step."""
    try:
        written = (run / "config.json").stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(written).isoformat(timespec="seconds")


def summarise(cell: dict[str, Any], *, repeats: int) -> None:
    """Set status, message, median and interval of a cell from its repeats.

    The cell is done when it has ``repeats`` good ones.
    """
    by_status = grouped((repeat["status"], repeat) for repeat in cell["repeats"])
    done, failed = by_status.get("done", []), by_status.get("failed", [])
    status = "failed" if failed else "pending"
    if done:
        status = "done" if len(done) >= repeats else "partial"
    rows = [_of_repeat(repeat["ranks"]) for repeat in done]
    names = rows[0] if rows else ()
    values = {name: [value for row in rows if (value := row[name]) is not None] for name in names}
    cell |= {
        "status": status,
        "message": failed[-1]["message"] if failed else None,
        "median": {
            name: statistics.median(column) if column else None for name, column in values.items()
        }
        or None,
        "interval": {name: interval(column) for name, column in values.items()} or None,
    }


def distinct(values: Sequence[V]) -> list[V]:
    """Return each value once, in order of appearance; the values need no hash."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _of_repeat(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the means over the ranks; for bytes sent, of the root and of the other ranks."""
    row: dict[str, float | None] = {
        name: statistics.fmean(rank["seconds"][name] for rank in ranks) for name in TIMES
    }
    sent = [rank["bytes_sent"] for rank in ranks]
    known = None not in sent
    return row | {
        "peak_memory_bytes": statistics.fmean(rank["peak_memory_bytes"] for rank in ranks),
        "root_bytes_sent": sent[0] if known else None,
        "others_bytes_sent": statistics.fmean(sent[1:] or [0.0]) if known else None,
    }


def interval(values: Sequence[float]) -> list[float | None]:
    """Return the 95 % interval of the mean of independent repeats, by Student's t, cut off at 0.

    [None, None] for fewer than two.
    """
    if len(values) < 2:
        return [None, None]
    from scipy.stats import t

    margin = (
        float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    )
    return [max(0.0, statistics.fmean(values) - margin), statistics.fmean(values) + margin]
