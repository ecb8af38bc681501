"""``results.json``: what a comparison measured. Read, checked, merged and written here; docs/comparing.md explains it.

A comparison has cells (a strategy on a number of nodes), a cell has repeats (runs), a repeat has a row for each rank.

    format, kind ("compare" or "report"), created, finished, emulated
    settings      what was asked for: dataset, model, batch_size, steps, warmup, repeats, seeds, nodes, sync, scaling, command …
    environment   of the machine, as in a run's environment.json
    warnings      what a reader must know first; differences: why runs cannot be compared (``lab report`` alone)
    prediction    null, or what was predicted before anything was measured: made, calibration, cells by id
    cells         id, sync, nodes, rate, batch_size, exact, group, oversubscribed, status (done, partial, failed, pending),
                  message, repeats (folder, seed, status, ranks, losses, test_accuracy, seconds_to_accuracy), median, interval
    groups        settings of each group by its number, as a text (``lab report`` alone)
    plan          of a comparison whose runs others start (job_plan.py): code (digests by file), runs (cell and repeat), to_do
                  (their numbers)
    timelines     by cell: one step, as in a run's timeline.json

Seconds and bytes throughout. ``median`` is over the repeats of the mean over the ranks; ``interval`` the 95 % interval of the
mean over repeats by Student's t, [null, null] where there is but one. Cells of different ``group`` are not comparable.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from lab.compare.cells import Settings, run_folder

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
    """Return the content of a ``results.json``; UserError, naming the file, where it is cut, foreign or of another format."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is cut or no results.json; left as it is"
        ) from error
    if not isinstance(results, dict) or "format" not in results:
        raise UserError(f"{path} is no results.json of lab compare; left as it is")
    if results["format"] != FORMAT:
        raise UserError(
            f"{path} has format {results['format']!r}, this version reads {FORMAT}: use the version that wrote it; "
            "left as it is"
        )
    _check_parts(path, results, _PARTS_OF_RESULTS, "")
    for index, cell in enumerate(results["cells"]):
        _check_parts(path, cell, _PARTS_OF_CELL, f"cells[{index}].")
    return results


def _check_parts(path: Path, content: Any, parts: Mapping[str, type], prefix: str) -> None:
    for name, kind in parts.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise UserError(
                f"{path}: {prefix}{name} is missing or no {kind.__name__}; left as it is"
            )


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results.json`` whole or not at all."""
    write_atomically(
        path, (json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    )


def read_repeat(folder: Path, *, seed: int) -> dict[str, Any]:
    """Return what a run that has ended left in ``folder``, as a repeat. UserError where it did not end."""
    summary, ranks = read_json(folder / "summary.json"), read_json(folder / "ranks.json")
    metrics = _read_lines(folder / "metrics.jsonl")
    return {
        "folder": str(folder),
        "seed": seed,
        "status": "done",
        "ranks": ranks["ranks"],
        "losses": [[entry["step"], entry["loss"]] for entry in metrics],
        "test_accuracy": summary["test_accuracy"],
        "seconds_to_accuracy": None,
        "steps_to_accuracy": None,
        "equal_weights": summary["ranks_hold_equal_weights"],
    }


def read_run(
    settings: Settings, cell: Mapping[str, Any], repeat: int, folder: Path
) -> dict[str, Any]:
    """Return what the run of a cell left in the comparison's ``folder``, as a repeat. UserError where it did not end."""
    path = run_folder(folder, cell, repeat)
    outcome = read_repeat(path, seed=settings.seeds_to_run[repeat])
    if settings.until_accuracy is not None:
        outcome |= time_to_accuracy(path, settings.until_accuracy)
    return outcome | {"repeat": repeat, "folder": str(path.relative_to(folder))}


def failed_run(
    settings: Settings, cell: Mapping[str, Any], repeat: int, folder: Path, *, message: str
) -> dict[str, Any]:
    """Return the repeat of a run that failed, with what it said."""
    return {
        "repeat": repeat,
        "folder": str(run_folder(folder, cell, repeat).relative_to(folder)),
        "seed": settings.seeds_to_run[repeat],
        "status": "failed",
        "message": message,
        "ranks": [],
        "losses": [],
        "test_accuracy": None,
        "seconds_to_accuracy": None,
        "steps_to_accuracy": None,
    }


def time_to_accuracy(path: Path, accuracy: float) -> dict[str, float | int | None]:
    """Training time (without the evaluations) and steps up to the end of the first epoch that reached ``accuracy``."""
    seconds = 0.0
    steps_per_epoch = read_json(path / "config.json")["steps_per_epoch"]
    for epoch in _read_lines(path / "epochs.jsonl"):
        seconds += epoch["seconds"]
        if epoch["val_accuracy"] is not None and epoch["val_accuracy"] >= accuracy:
            return {
                "seconds_to_accuracy": seconds,
                "steps_to_accuracy": epoch["epoch"] * steps_per_epoch,
            }
    return {"seconds_to_accuracy": None, "steps_to_accuracy": None}


def take_timeline(
    results: dict[str, Any], cell: Mapping[str, Any], outcome: Mapping[str, Any], folder: Path
) -> None:
    """Keep the timeline of a cell's first repeat that has one."""
    timeline = folder / outcome["folder"] / "timeline.json"
    if outcome["status"] == "done" and cell["id"] not in results["timelines"] and timeline.exists():
        results["timelines"][cell["id"]] = read_json(timeline)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a run. UserError where it is missing or cut."""
    return _parsed(path, json.loads)


def _read_lines(path: Path) -> list[Any]:
    return _parsed(path, lambda text: [json.loads(line) for line in text.splitlines()])


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): the run has not ended, or its folder was not copied whole"
        ) from error


def summarise(cell: dict[str, Any], *, repeats: int) -> None:
    """Set status, median and interval of a cell from its repeats, of which there shall be ``repeats``."""
    done = [repeat for repeat in cell["repeats"] if repeat["status"] == "done"]
    failed = [repeat for repeat in cell["repeats"] if repeat["status"] == "failed"]
    cell["status"] = (
        "done" if len(done) >= repeats else "partial" if done else "failed" if failed else "pending"
    )
    cell["message"] = failed[-1]["message"] if failed else None
    cell["median"] = cell["interval"] = None
    if done:
        rows = [_of_repeat(repeat["ranks"]) for repeat in done]
        cell["median"] = {name: _median([row[name] for row in rows]) for name in rows[0]}
        cell["interval"] = {name: interval([row[name] for row in rows]) for name in rows[0]}


def _of_repeat(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over the ranks; of bytes, root and the others apart."""
    row: dict[str, float | None] = {
        name: statistics.fmean(rank["seconds"][name] for rank in ranks) for name in TIMES
    }
    others = [rank["bytes_sent"] for rank in ranks[1:]]
    known = all(rank["bytes_sent"] is not None for rank in ranks)
    return row | {
        "peak_memory_bytes": statistics.fmean(rank["peak_memory_bytes"] for rank in ranks),
        "root_bytes_sent": ranks[0]["bytes_sent"] if known else None,
        "others_bytes_sent": (statistics.fmean(others) if others else 0.0) if known else None,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def interval(values: Sequence[float | None]) -> list[float | None]:
    """Return the 95 % interval of the mean of independent repeats, by Student's t, cut at 0; [None, None] for fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return [None, None]
    from scipy.stats import t

    half = float(t.ppf(0.975, len(known) - 1)) * statistics.stdev(known) / math.sqrt(len(known))
    return [max(0.0, statistics.fmean(known) - half), statistics.fmean(known) + half]
