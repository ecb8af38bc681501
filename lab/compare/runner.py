"""Run the cells of a comparison in turns, and save the results after each run.

``open_comparison`` finds an interrupted comparison with the same settings or begins a new one.
``run_comparison`` then predicts, if it must, and runs what is missing; executors.py starts the
processes.
"""

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.emulation.compute_profile import load_profile
from common.errors import UserError, count
from common.utils.paths import new_folder
from common.utils.progress import duration
from lab.compare.cells import Run, choose_buckets, in_turns, node_command, plan_cells, profile_file
from lab.compare.executors import Executors
from lab.compare.outcomes import describe_times, failed_run, read_run
from lab.compare.results import FORMAT, read_results, summarise, take_timeline, write_results
from lab.compare.settings import Settings

_LIMIT_SECONDS = 3600
_START_UP_SECONDS = 10.0  # of a run: imports, data, process group, model
_LONG_SECONDS = 30.0
_SAME_MACHINE = ("python", "torch", "cpu", "usable_cores", "git_commit")

console = Console(highlight=False)


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
    code : given for a plan, whose runs other programs start (job_plan.py). An unfinished plan must
        have the same code; any other comparison must be of the same machine.

    Prints a notice about results that are unreadable or written by another version, and leaves
    them unchanged.
    """
    # Imports torch, which takes seconds: --help must not wait for it.
    from common.utils.environment import environment

    here = environment()
    now = code if code is not None else {name: here.get(name) for name in _SAME_MACHINE}
    found = None if anew else _find_unfinished(settings, reports, now, planned=code is not None)
    return found or _begin(settings, reports, command, here, code)


def _begin(
    settings: Settings,
    reports: Path,
    command: str,
    here: dict[str, Any],
    code: Mapping[str, str] | None,
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of a new comparison, whose runs are all pending."""
    profile = (
        load_profile(settings.compute, model=settings.model, machine=here["cpu"])
        if settings.emulated
        else None
    )
    cells = plan_cells(settings)
    folder = new_folder(reports, "compare")
    computes_here = not here["gpus"] and not settings.emulated and code is None
    results = {
        "format": FORMAT,
        "kind": "compare",
        "created": datetime.now().isoformat(timespec="seconds"),
        "finished": False,
        "emulated": settings.emulated or bool(settings.rates),
        "settings": settings.as_json() | {"command": command},
        "environment": here,
        "warnings": _mark_oversubscribed(cells, here["usable_cores"]) if computes_here else [],
        "differences": [],
        "prediction": None,
        "cells": cells,
        "timelines": {},
    }
    if code is not None:
        runs = [[run.cell["id"], run.repeat] for run in in_turns(folder, settings, cells)]
        results["plan"] = {"code": dict(code), "runs": runs}
    if profile is not None:  # the comparison's own copy, which stays the same
        profile.save(profile_file(folder))
    write_results(folder / "results.json", results)
    return folder, results


def _mark_oversubscribed(cells: Sequence[dict[str, Any]], cores: int) -> list[str]:
    """Mark the cells with more ranks than cores; return a warning if there are any."""
    for cell in cells:
        cell["oversubscribed"] = cell["nodes"] > cores
    crowded = sorted({cell["nodes"] for cell in cells if cell["oversubscribed"]})
    warning = (
        f"{' and '.join(map(str, crowded))} ranks share {count(cores, 'core')}, so their forward "
        "and backward passes take turns: step times do not show what as many nodes would take, and "
        "the ranks wait longer for each other"
    )
    return [warning] if crowded else []


def _find_unfinished(
    settings: Settings, reports: Path, now: Mapping[str, Any], *, planned: bool
) -> tuple[Path, dict[str, Any]] | None:
    """Return folder and results of the newest unfinished comparison with these settings.

    Leaves out its failed runs, so they run again.

    now : facts of the machine that must be the same; of the code if ``planned``.
    """
    found = []
    for path in sorted(reports.glob("compare-*/results.json"), reverse=True):
        try:
            found.append((path, read_results(path)))
        except UserError as error:
            console.print(f"notice: {error}", markup=False, soft_wrap=True)
    # By the recorded time; a folder may have been renamed.
    for path, results in sorted(found, key=lambda one: one[1]["created"], reverse=True):
        asked = settings.as_json() | {"command": results["settings"].get("command")}
        if results["finished"] or results["settings"] != asked or ("plan" in results) != planned:
            continue
        before = results["plan"]["code"] if planned else results["environment"]
        differing = [name for name in now if before.get(name) != now[name]]
        if not differing:
            console.print(f"resuming {path.parent}", soft_wrap=True)
            for cell in results["cells"]:
                cell["repeats"] = [one for one in cell["repeats"] if one["status"] == "done"]
            return path.parent, results
        console.print(
            f"notice: {path.parent} has the same settings, but was started with another "
            f"{', '.join(differing)}, so a new comparison starts; the old folder stays unchanged",
            soft_wrap=True,
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
        if predicts and results["prediction"] is None:
            from lab.compare.prediction import predict_comparison

            predict_comparison(results, settings, folder, executors)
        for line in choose_buckets(results):
            console.print(line, markup=False, soft_wrap=True)
        write_results(folder / "results.json", results)
        _run_missing(settings, folder, results, executors)
    results["finished"] = all(cell["status"] == "done" for cell in results["cells"])
    write_results(folder / "results.json", results)


class TimeLeft:
    """Estimates the time of the runs ``to_do``: predicted first, then scaled by the finished ones.

    A run takes its start-up and its steps as predicted; without a prediction the time is unknown
    until the first run has ended.
    """

    def __init__(self, to_do: Sequence[Run], prediction: Mapping[str, Any] | None) -> None:
        cells = (prediction or {}).get("cells", {})
        known = [cells.get(run.cell["id"], {}).get("step_seconds") for run in to_do]
        predicted = [step for step in known if step is not None]
        timed = bool(to_do) and to_do[0].settings.until_accuracy is None
        self._seconds: list[float] = []
        if predicted and timed:
            usual = statistics.median(predicted)  # for a strategy that cannot be predicted
            self._seconds = [
                _START_UP_SECONDS + run.settings.total_steps * (usual if step is None else step)
                for run, step in zip(to_do, known, strict=True)
            ]
        self._runs = len(to_do)

    def announcement(self) -> str:
        """Return how long all runs take, for a person."""
        if not self._seconds:
            return "time unknown until the first run has ended"
        return f"about {duration(sum(self._seconds))}"

    def after(self, done: int, elapsed: float) -> str:
        """Return the time left when ``done`` runs took ``elapsed`` seconds; "" if unknown."""
        weights = self._seconds or [1.0] * self._runs
        if done == self._runs or (not done and not self._seconds):
            return ""
        pace = elapsed / sum(weights[:done]) if done else 1.0
        return f"about {duration(pace * sum(weights[done:]))} left"

    def is_long(self, index: int) -> bool:
        """Return whether a run may take so long that its start should be shown."""
        return not self._seconds or self._seconds[index] > _LONG_SECONDS


def _run_missing(
    settings: Settings, folder: Path, results: dict[str, Any], executors: Executors
) -> None:
    runs = in_turns(folder, settings, results["cells"])
    to_do = [
        run for run in runs if run.repeat not in [one["repeat"] for one in run.cell["repeats"]]
    ]
    time_left = TimeLeft(to_do, results["prediction"])
    console.print(
        f"{len(to_do)} of {count(len(runs), 'run')} to do, one after the other, "
        f"{time_left.announcement()}, in {folder}",
        soft_wrap=True,
    )
    for warning in results["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    with _progress_bar() as bar:
        began = time.monotonic()
        task = bar.add_task("", total=len(to_do), left=time_left.after(0, 0.0))
        for number, run in enumerate(to_do, start=1):
            bar.update(task, description=run.title)
            run_began, started = time.monotonic(), datetime.now().isoformat(timespec="seconds")
            if not console.is_terminal and time_left.is_long(number - 1):
                console.print(f"[{number}/{len(to_do)}] {run.title}: running", markup=False)
            outcome = _run(run, executors) | {"started": started}
            run.cell["repeats"].append(outcome)
            run.cell["repeats"].sort(key=lambda one: one["repeat"])
            summarise(run.cell, repeats=len(settings.seeds_to_run))
            take_timeline(results, run.cell, outcome, folder)
            write_results(folder / "results.json", results)
            now = time.monotonic()
            left = time_left.after(number, now - began)
            failed = outcome["status"] == "failed"
            words = f"FAILED: {outcome['message']}" if failed else describe_times(outcome)
            console.print(
                f"[{number}/{len(to_do)}] {run.title}: {words} (took {duration(now - run_began)}"
                f"{'; ' if left else ''}{left})",
                markup=False,
                soft_wrap=True,
            )
            bar.update(task, completed=number, left=left)


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
    if message is None:
        try:
            return read_run(run)
        except UserError as error:
            message = str(error)
    return failed_run(run, message)


def _progress_bar() -> Progress:
    """Return a bar of the finished runs and the time left; it is invisible off a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
    )
