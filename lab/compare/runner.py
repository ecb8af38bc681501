"""Run the cells of a comparison in turns, and save the results after each run.

``open_comparison`` finds an interrupted comparison with the same settings or begins a new one.
``run_comparison`` then predicts, if it must, and runs what is missing; executors.py starts the
processes.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.emulation.compute_profile import load_profile
from common.errors import UserError, count
from common.utils.paths import new_folder
from common.utils.progress import console, duration, progress_bar
from lab.compare.cells import PROFILE, Run, choose_buckets, in_turns, node_command, plan_cells
from lab.compare.executors import Executors
from lab.compare.outcomes import describe_times, failed_run, read_run
from lab.compare.results import FORMAT, gather, read_results, write_results
from lab.compare.settings import Settings

_LIMIT_SECONDS = 3600
_START_UP_SECONDS = 10.0  # of a run: imports, data, process group, model
_SAME_MACHINE = ("python", "torch", "cpu", "usable_cores", "git_commit")


def open_comparison(
    settings: Settings,
    *,
    reports: Path,
    anew: bool = False,
    command: str = "lab compare",
    code: Mapping[str, str] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of the newest unfinished comparison of this kind, or of a new one.

    Parameters
    ----------
    reports : receives ``compare-<time>/``, and is searched for an unfinished comparison.
    anew : begin a new one in any case.
    command : the command line, for the reader.
    code : given for a plan, whose runs other programs start (jobs.py). An unfinished plan must have
        the same code; any other comparison must be of the same machine.

    Prints a notice about results that are unreadable or written by another version, and leaves
    them unchanged.
    """
    # Imports torch, which takes seconds: --help must not wait for it.
    from common.utils.environment import environment

    here, planned = environment(), code is not None
    now = code if code is not None else {name: here.get(name) for name in _SAME_MACHINE}
    if not anew and (found := _find_unfinished(settings, reports, now, planned=planned)):
        return found
    profile = (
        load_profile(settings.compute, model=settings.model, machine=here["cpu"])
        if settings.emulated
        else None
    )
    elsewhere = here["gpus"] or settings.emulated or planned
    cores = math.inf if elsewhere else here["usable_cores"]
    cells, folder = plan_cells(settings, cores=cores), new_folder(reports, "compare")
    crowded = sorted({cell["nodes"] for cell in cells if cell["oversubscribed"]})
    warning = (
        f"{' and '.join(map(str, crowded))} ranks share {count(here['usable_cores'], 'core')}, so "
        "their forward and backward passes take turns: step times do not show what as many nodes "
        "would take, and the ranks wait longer for each other"
    )
    results = {
        "format": FORMAT,
        "kind": "compare",
        "created": datetime.now().isoformat(timespec="seconds"),
        "finished": False,
        "emulated": settings.emulated or any(settings.rates),
        "settings": settings.as_json() | {"command": command},
        "environment": here,
        "warnings": [warning] if crowded else [],
        "differences": [],
        "prediction": None,
        "cells": cells,
        "timelines": {},
    }
    if planned:
        runs = in_turns(folder, settings, cells)
        results["plan"] = {"code": code, "runs": [[*run.key] for run in runs]}
    if profile is not None:  # the comparison's own copy, which stays the same
        profile.save(folder / PROFILE)
    write_results(folder / "results.json", results)
    return folder, results


def _find_unfinished(
    settings: Settings, reports: Path, now: Mapping[str, Any], *, planned: bool
) -> tuple[Path, dict[str, Any]] | None:
    """Return folder and results of the newest unfinished comparison with these settings.

    now : facts of the machine that must be the same; of the code if ``planned``.
    """
    found = []
    for path in reports.glob("compare-*/results.json"):
        try:
            found.append((read_results(path), path.parent))
        except UserError as error:
            console.print(f"notice: {error}", markup=False)
    # By the recorded time; a folder may have been renamed.
    for results, folder in sorted(found, key=lambda one: one[0]["created"], reverse=True):
        asked = settings.as_json() | {"command": results["settings"].get("command")}
        if results["finished"] or results["settings"] != asked or ("plan" in results) != planned:
            continue
        before = results["plan"]["code"] if planned else results["environment"]
        differing = [name for name in now if before.get(name) != now[name]]
        if not differing:
            console.print(f"resuming {folder}", markup=False)
            return folder, results
        console.print(
            f"notice: {folder} has the same settings, but was started with another "
            f"{', '.join(differing)}, so a new comparison starts; the old folder stays unchanged",
            markup=False,
        )
    return None


def run_comparison(
    settings: Settings,
    folder: Path,
    results: dict[str, Any],
    executors: Executors,
    *,
    predicts: bool = False,
) -> None:
    """Run the missing runs of an opened comparison, and write ``results.json`` after each.

    predicts : predict the step times before the first run. Raises KeyboardInterrupt after Ctrl-C,
    once all processes have ended; the finished runs are saved.
    """
    with executors:
        prepare(settings, folder, results, executors, predicts=predicts)
        runs = in_turns(folder, settings, results["cells"])
        outcomes = {
            (cell["id"], repeat["repeat"]): repeat
            for cell in results["cells"]
            for repeat in cell["repeats"]
            if repeat["status"] == "done"  # what has failed runs again
        }
        to_do = [run for run in runs if run.key not in outcomes]
        console.print(
            f"{len(to_do)} of {count(len(runs), 'run')} to do, one after the other, "
            f"{time_left(to_do, results['prediction'])}, in {folder}",
            markup=False,
        )
        for warning in results["warnings"]:
            console.print(f"warning: {warning}", markup=False)
        began = time.monotonic()
        with progress_bar() as bar:
            task = bar.add_task("", total=len(to_do))
            for number, run in enumerate(to_do, start=1):
                title, started = f"[{number}/{len(to_do)}] {run.title}", datetime.now()
                bar.update(task, description=run.title, completed=number - 1, refresh=True)
                if not console.is_terminal:
                    console.print(f"{title}: running", markup=False)
                outcome = _run(run, executors) | {"started": started.isoformat(timespec="seconds")}
                outcomes[run.key] = outcome
                results["cells"], timelines = gather(
                    folder,
                    [(one.cell, outcomes.get(one.key, {}), None) for one in runs],
                    repeats=len(settings.seeds_to_run),
                )
                results["timelines"] |= timelines
                results["finished"] = all(cell["status"] == "done" for cell in results["cells"])
                write_results(folder / "results.json", results)
                failed = outcome["status"] == "failed"
                words = f"FAILED: {outcome['message']}" if failed else describe_times(outcome)
                words += f" (took {duration((datetime.now() - started).total_seconds())}"
                if number < len(to_do):
                    elapsed = time.monotonic() - began
                    words += f"; {time_left(to_do, results['prediction'], number, elapsed)} left"
                console.print(f"{title}: {words})", markup=False)


def prepare(
    settings: Settings,
    folder: Path,
    results: dict[str, Any],
    executors: Executors | None,
    *,
    predicts: bool,
) -> None:
    """Do once what must be done before the first run: predict, and choose sizes of buckets.

    executors : None if other programs start the runs.
    """
    if predicts and results["prediction"] is None:
        from lab.compare.prediction import predict

        predict(results, settings, folder, executors)
    for line in choose_buckets(results):
        console.print(line, markup=False)
    write_results(folder / "results.json", results)


def time_left(
    to_do: Sequence[Run],
    prediction: Mapping[str, Any] | None,
    done: int = 0,
    elapsed: float = 0.0,
) -> str:
    """Return the time that the runs after the first ``done`` take, which took ``elapsed`` seconds.

    A run takes its start-up, and its steps as predicted. Without a prediction all take the same.
    """
    steps_known = all(run.settings.until_accuracy is None for run in to_do)
    cells = prediction["cells"] if prediction and steps_known else {}
    if not (cells or done):
        return "time unknown until the first run has ended"
    steps = [cells[run.cell["id"]]["step_seconds"] if cells else 0.0 for run in to_do]
    expected = [
        _START_UP_SECONDS + run.settings.total_steps * step
        for run, step in zip(to_do, steps, strict=True)
    ]
    pace = elapsed / sum(expected[:done]) if done else 1.0
    return f"about {duration(pace * sum(expected[done:]))}"


def _run(run: Run, executors: Executors) -> dict[str, Any]:
    """Run one repeat of a cell and return it; a failure is a repeat with a message."""
    shutil.rmtree(run.path, ignore_errors=True)  # of a run that was interrupted
    message = executors.run(
        node_command(run),
        run.nodes,
        rate=run.cell["rate"],
        logs=run.logs,
        limit_seconds=_LIMIT_SECONDS,
    )
    try:
        return read_run(run) if message is None else failed_run(run, message)
    except UserError as error:
        return failed_run(run, str(error))
