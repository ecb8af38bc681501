"""Run the cells of a comparison in turns, and save the results after each run.

``open_comparison`` finds an interrupted comparison with the same settings or begins a new one.
``prepare`` predicts, if it must, and ``run_comparison`` runs what is missing; executors.py starts
the processes.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import UNSET

from common.emulation.compute_profile import load_profile
from common.errors import UserError
from common.say import count, counts, minutes_text
from common.utils.paths import new_folder
from common.utils.progress import console, progress_bar
from lab.compare.cells import PROFILE, Run, choose_buckets, node_command, plan_cells
from lab.compare.executors import Executors
from lab.compare.outcomes import describe_times, failed_run, read_outcome
from lab.compare.settings import Settings
from lab.comparison.cell import CellRun, fill
from lab.comparison.record import (
    Cell,
    Comparison,
    Plan,
    Prediction,
    Repeat,
    read_comparison,
    write_comparison,
)

_START_UP_SECONDS = 10.0  # of a run: imports, data, process group, model
_SAME_MACHINE = ("python", "torch", "cpu", "usable_cores", "git_commit")


def open_comparison(
    settings: Settings,
    *,
    reports: Path,
    anew: bool = False,
    command: str = "lab compare",
    code: Mapping[str, str] | None = None,
) -> tuple[Path, Comparison]:
    """Return the newest unfinished comparison of this kind, or a new one, and its folder.

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

    here = environment()
    if not anew:
        found = _find_unfinished(settings, reports, here, code)
        if found is not None:
            return found
    profile = None
    if settings.emulated:
        profile = load_profile(settings.compute, model=settings.model, machine=here["cpu"])
    # Ranks on GPUs, with emulated compute or on other machines do not take this machine's cores.
    share_cores = not (here["gpus"] or settings.emulated or code is not None)
    cells = plan_cells(settings, cores=here["usable_cores"] if share_cores else math.inf)
    folder = new_folder(reports, "compare")
    comparison = Comparison(
        kind="compare",
        created=datetime.now().isoformat(timespec="seconds"),
        finished=False,
        emulated=settings.emulated or any(settings.rates),
        settings=settings.as_json() | {"command": command},
        environment=here,
        warnings=_warnings(cells, here["usable_cores"]),
        cells=cells,
        timelines={},
    )
    if code is not None:
        comparison.plan = Plan(code=dict(code))
    if profile is not None:  # the comparison's own copy, which stays the same
        profile.save(folder / PROFILE)
    write_comparison(folder / "results.json", comparison)
    return folder, comparison


def _warnings(cells: Sequence[Cell], cores: int) -> list[str]:
    """Return a warning if ranks share cores, else nothing."""
    crowded = sorted({cell.ranks for cell in cells if cell.oversubscribed})
    if not crowded:
        return []
    return [
        f"{counts(crowded, 'rank')} share {count(cores, 'core')}, so "
        "their forward and backward passes take turns: step times do not show what as many "
        "machines would take, and the ranks wait longer for each other"
    ]


def _find_unfinished(
    settings: Settings, reports: Path, here: Mapping[str, Any], code: Mapping[str, str] | None
) -> tuple[Path, Comparison] | None:
    """Return the newest unfinished comparison with these settings, and its folder.

    here : the facts of this machine, on which it was started; of a plan ``code`` must be the same.
    """
    for folder, comparison in _comparisons(reports):
        command = comparison.settings.get("command")
        if comparison.finished or comparison.settings != settings.as_json() | {"command": command}:
            continue
        if code is None:
            if comparison.plan is not UNSET:
                continue
            before = comparison.environment
            differing = [name for name in _SAME_MACHINE if before.get(name) != here.get(name)]
        else:
            if comparison.plan is UNSET:
                continue
            planned = comparison.plan.code
            differing = [name for name in code if planned.get(name) != code[name]]
        if not differing:
            console.print(f"resuming {folder}", markup=False)
            return folder, comparison
        console.print(
            f"notice: {folder} has the same settings, but was started with another "
            f"{', '.join(differing)}, so a new comparison starts; the old folder stays unchanged",
            markup=False,
        )
    return None


def _comparisons(reports: Path) -> list[tuple[Path, Comparison]]:
    """Return all comparisons and their folders, the newest first; print which are unreadable."""
    found = []
    for path in reports.glob("compare-*/results.json"):
        try:
            found.append((path.parent, read_comparison(path)))
        except UserError as error:
            console.print(f"notice: {error}", markup=False)
    # By the recorded time; a folder may have been renamed.
    return sorted(found, key=lambda entry: entry[1].created, reverse=True)


def run_comparison(comparison: Comparison, runs: Sequence[Run], executors: Executors) -> None:
    """Run those of ``runs`` that are missing, and write ``results.json`` after each.

    runs : all runs of the comparison, in their order. Raises KeyboardInterrupt after Ctrl-C; the
    finished runs are saved.
    """
    folder = runs[0].folder
    # What has failed runs again.
    outcomes = {
        (cell.id, repeat.repeat): repeat for cell in comparison.cells for repeat in cell.runs
    }
    to_do = [run for run in runs if run.key not in outcomes]
    console.print(
        f"{len(to_do)} of {count(len(runs), 'run')} to do, one after the other, "
        f"{time_left(to_do, comparison.prediction)}, in {folder}",
        markup=False,
    )
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", markup=False)
    began = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("", total=len(to_do))
        for number, run in enumerate(to_do, start=1):
            bar.update(task, description=run.title, completed=number - 1, refresh=True)
            title = f"[{number}/{len(to_do)}] {run.title}"
            if not console.is_terminal:
                console.print(f"{title}: running", markup=False)
            started = datetime.now()
            outcome = _run(run, executors)
            outcome.started = started.isoformat(timespec="seconds")
            outcomes[run.key] = outcome
            _add_outcomes(comparison, runs, outcomes)
            took = f"took {minutes_text((datetime.now() - started).total_seconds())}"
            if number < len(to_do):
                elapsed = time.monotonic() - began
                left = time_left(to_do, comparison.prediction, number, elapsed)
                took += f"; {left} left"
            words = describe_times(outcome) if outcome.done else f"FAILED: {outcome.message}"
            console.print(f"{title}: {words} ({took})", markup=False)


def _add_outcomes(
    comparison: Comparison, runs: Sequence[Run], outcomes: Mapping[tuple[str, int], Repeat]
) -> None:
    """Put the repeats of all runs so far into their cells, and write ``results.json``."""
    folder = runs[0].folder
    fill(
        comparison,
        folder,
        [CellRun(run.cell, outcomes.get(run.key)) for run in runs],
        str,
        repeats=len(runs[0].settings.seeds_to_run),
    )
    comparison.finished = all(cell.status == "done" for cell in comparison.cells)
    write_comparison(folder / "results.json", comparison)


def prepare(
    settings: Settings,
    folder: Path,
    comparison: Comparison,
    executors: Executors | None,
    *,
    predicts: bool,
) -> None:
    """Do once what must be done before the first run: predict, and choose sizes of buckets.

    executors : None if other programs start the runs.
    """
    if predicts and comparison.prediction is None:
        from lab.compare.prediction import predict

        predict(comparison, settings, folder, executors)
    for line in choose_buckets(comparison.cells, comparison.prediction):
        console.print(line, markup=False)
    write_comparison(folder / "results.json", comparison)


def time_left(
    to_do: Sequence[Run],
    prediction: Prediction | None,
    done: int = 0,
    elapsed: float = 0.0,
) -> str:
    """Return the time that the runs after the first ``done`` take, which took ``elapsed`` seconds.

    A run takes its start-up, and its steps as predicted. Without a prediction all take the same.
    """
    expected = [_START_UP_SECONDS] * len(to_do)
    steps_known = all(run.settings.until_accuracy is None for run in to_do)
    if prediction is not None and prediction.cells and steps_known:
        for place, run in enumerate(to_do):
            step_seconds = prediction.cells[run.cell.id].step_seconds
            expected[place] += run.settings.total_steps * step_seconds
    elif done == 0:
        return "time unknown until the first run has ended"
    pace = 1.0  # how many times as long as expected the finished runs took
    if done:
        pace = elapsed / sum(expected[:done])
    return f"about {minutes_text(pace * sum(expected[done:]))}"


def _run(run: Run, executors: Executors) -> Repeat:
    """Run one repeat of a cell and return it; a failure is a repeat with a message."""
    assert run.cell.rate is None or isinstance(run.cell.rate, str)  # as --rate was given
    shutil.rmtree(run.path, ignore_errors=True)  # of a run that was interrupted
    message = executors.run(
        node_command(run),
        run.ranks,
        rate=run.cell.rate,
        logs=run.logs,
    )
    if message is not None:
        return failed_run(run, message)
    try:
        return read_outcome(run)
    except UserError as error:
        return failed_run(run, str(error))
