"""``lab compare``: run every cell as a student would start it, in turns, and keep what is finished whatever happens.

Order: ``open_comparison`` finds an interrupted one with the same settings or begins a new one; the prediction is fixed; then the
cells run in turns (lab/compare/executors.py says where), each repeat in the opposite order of the
one before; ``lab.report`` draws what there is.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.emulation.compute_profile import Profile, load_profile
from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.paths import new_folder
from lab.compare.cells import (
    Settings,
    in_turns,
    node_command,
    plan_cells,
    profile_file,
    run_folder,
    run_name,
)
from lab.compare.executors import Executors
from lab.compare.results import (
    FORMAT,
    failed_run,
    read_results,
    read_run,
    summarise,
    take_timeline,
    write_results,
)

_LIMIT_SECONDS = 3600
_SAME_MACHINE = ("python", "torch", "cpu", "usable_cores", "git_commit")

console = Console(highlight=False)


def compare(
    settings: Settings,
    *,
    reports: Path,
    anew: bool = False,
    command: str = "lab compare",
    predict: Callable[[dict[str, Any], Path, Executors], None] | None = None,
    opened: Callable[[Path], None] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run what is missing of the comparison, write ``results.json`` after every run, and return its folder and results.

    Parameters
    ----------
    reports : receives ``compare-<time>/``, and is searched for an interrupted comparison with the same settings.
    anew : begin a new one all the same.
    command : what was typed, for the reader.
    predict : called once, before the first run, with the results, to set their ``prediction``, the folder, and where it runs.
    opened : called with the folder as soon as it is known.

    Raises KeyboardInterrupt after Ctrl-C, when everything is ended and saved.
    """
    executors = Executors(max(settings.nodes), settings.rates)
    folder, results = open_comparison(settings, reports=reports, anew=anew, command=command)
    if opened is not None:
        opened(folder)
    with executors:
        if predict is not None and results["prediction"] is None:
            predict(results, folder, executors)
            write_results(folder / "results.json", results)
        _run_all(settings, results, folder, executors)
    results["finished"] = all(cell["status"] == "done" for cell in results["cells"])
    write_results(folder / "results.json", results)
    return folder, results


def _run_all(
    settings: Settings, results: dict[str, Any], folder: Path, executors: Executors
) -> None:
    runs = in_turns(settings, results["cells"])
    todo = [
        (cell, repeat)
        for cell, repeat in runs
        if repeat not in [one["repeat"] for one in cell["repeats"]]
    ]
    console.print(
        f"{len(todo)} of {len(runs)} runs to do, one after the other, in {folder}", soft_wrap=True
    )
    for warning in results["warnings"]:
        console.print(f"warning: {warning}", soft_wrap=True)
    with _Progress(len(todo)) as progress:
        for cell, repeat in todo:
            progress.begin(cell, repeat)
            outcome = _run(settings, cell, repeat, folder, executors)
            cell["repeats"] = sorted(
                [one for one in cell["repeats"] if one["repeat"] != repeat] + [outcome],
                key=lambda one: one["repeat"],
            )
            summarise(cell, repeats=len(settings.seeds_to_run))
            take_timeline(results, cell, outcome, folder)
            write_results(folder / "results.json", results)
            progress.done(outcome)


def open_comparison(
    settings: Settings,
    *,
    reports: Path,
    anew: bool,
    command: str,
    code: Mapping[str, str] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of the newest unfinished comparison with these settings, or of a new one.

    code : of a comparison that is planned, and whose runs others start (job_plan.py): what must be the same when it goes on, in
    place of this machine, on which it does not run. Results that cannot be read, or that another version wrote, are named and
    left alone.
    """
    here = _machine()
    for path in sorted(reports.glob("compare-*/results.json"), reverse=True):
        if anew:
            break
        try:
            results = read_results(path)
        except UserError as error:
            console.print(f"notice: {error}", soft_wrap=True)
            continue
        if (
            results["finished"]
            or _asked(results["settings"]) != settings.as_json()
            or ("plan" in results) != (code is not None)
        ):
            continue
        before = results["environment"] if code is None else results["plan"].get("code", {})
        now = here if code is None else code
        names = _SAME_MACHINE if code is None else sorted(code)
        differing = [name for name in names if before.get(name) != now.get(name)]
        if differing:
            console.print(
                f"notice: {path.parent} has the same settings, but was begun with another "
                f"{', '.join(differing)}; it is left as it is, and a new one begins",
                soft_wrap=True,
            )
            continue
        console.print(f"going on with {path.parent}", soft_wrap=True)
        for cell in results["cells"]:  # what failed is tried again
            cell["repeats"] = [one for one in cell["repeats"] if one["status"] == "done"]
        return path.parent, results
    profile = _profile(settings, here)
    folder = new_folder(reports, "compare")
    cells = plan_cells(settings)
    warnings: list[str] = []
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for cell in cells:
        cell["oversubscribed"] = (
            cell["nodes"] > cores and not here["gpus"] and not settings.emulated and code is None
        )
    if crowded := sorted({cell["nodes"] for cell in cells if cell["oversubscribed"]}):
        warnings.append(
            f"{' and '.join(map(str, crowded))} ranks share {cores} cores: their forward and backward take turns, so "
            "step times tell of the machine, not of as many nodes, and waiting for slower ranks grows"
        )
    results = {
        "format": FORMAT,
        "kind": "compare",
        "created": datetime.now().isoformat(timespec="seconds"),
        "finished": False,
        "emulated": settings.emulated or bool(settings.rates),
        "settings": settings.as_json() | {"command": command},
        "environment": here,
        "warnings": warnings,
        "differences": [],
        "prediction": None,
        "cells": cells,
        "timelines": {},
    }
    if code is not None:
        results["plan"] = {
            "code": dict(code),
            "runs": [[cell["id"], repeat] for cell, repeat in in_turns(settings, cells)],
        }
    if profile is not None:
        write_atomically(profile_file(folder), json.dumps(profile.as_json(), indent=1).encode())
    write_results(folder / "results.json", results)
    return folder, results


def _profile(settings: Settings, here: dict[str, Any]) -> Profile | None:
    """The profile of emulated compute, which the comparison keeps: it stays the same however long the comparison takes."""
    if not settings.emulated:
        return None
    return load_profile(settings.compute, model=settings.model, machine=here["cpu"])


def _asked(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "command"}


def _machine() -> dict[str, Any]:
    # Imports torch, which takes seconds: only a comparison needs it.
    from common.utils.environment import environment

    return environment()


def _run(
    settings: Settings, cell: dict[str, Any], repeat: int, folder: Path, executors: Executors
) -> dict[str, Any]:
    """Run one repeat of a cell and return it; a failure is a repeat with a message."""
    interrupted = run_folder(folder, cell, repeat)
    shutil.rmtree(interrupted, ignore_errors=True)
    logs = folder / "logs" / f"{cell['id']}-{repeat + 1}"
    message = executors.run(
        node_command(settings, cell, repeat, folder),
        cell["nodes"],
        rate=cell["rate"],
        logs=logs,
        limit_seconds=_LIMIT_SECONDS,
    )
    if message is None:
        try:
            return read_run(settings, cell, repeat, folder)
        except UserError as error:
            message = str(error)
    return failed_run(settings, cell, repeat, folder, message=message)


class _Progress:
    """Overall progress and time left: a bar on a terminal, a line a run elsewhere."""

    def __init__(self, runs: int) -> None:
        self._runs, self._done = runs, 0
        self._seconds: list[float] = []
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "_Progress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._runs, left="")
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, cell: dict[str, Any], repeat: int) -> None:
        """A run begins."""
        self._began, self._name = time.monotonic(), run_name(cell, repeat)
        if self._bar is not None:
            self._bar.update(self._task, description=self._name)

    def done(self, outcome: dict[str, Any]) -> None:
        """A run has ended."""
        self._done += 1
        self._seconds.append(time.monotonic() - self._began)
        left = f"{_duration(statistics.fmean(self._seconds) * (self._runs - self._done))} left"
        if outcome["status"] == "done":
            step, sync = (
                statistics.fmean(rank["seconds"][name] for rank in outcome["ranks"])
                for name in ("step", "sync")
            )
            words = f"{step:.3f} s a step, {sync:.3f} of it sync"
        else:
            words = f"FAILED: {outcome['message']}"
        console.print(
            f"[{self._done}/{self._runs}] {self._name}: {words} ({self._seconds[-1]:.0f} s; {left})",
            markup=False,
            soft_wrap=True,
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, left=left)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
