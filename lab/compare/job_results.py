"""Merge what the runs of a plan have written so far into ``results.json``.

The warnings in it name the runs that are missing or failed. ``merge_results`` may be called at any
moment, even during runs; nothing else writes ``results.json``. The runs themselves also use
``why_failed`` and ``try_lock``.
"""

import contextlib
import fcntl
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

from msgspec import Meta, Struct

from common.utils.atomic_files import regular_target
from common.utils.grouping import grouped
from common.utils.paths import IN_CHECKOUT
from common.utils.typed_json import Text
from lab.compare.cells import Run
from lab.compare.job_plan import (
    by_hand,
    how_to_run,
    name_of,
    outcome_of,
    output_file,
    planned_runs,
    runs_by_nodes,
    spans,
)
from lab.compare.outcomes import (
    MACHINE_FACTS,
    describe_failure,
    failed_run,
    ranks_share_cores,
    read_environment,
    read_run_file,
)
from lab.compare.results import distinct, summarise, take_timeline, write_results
from lab.predict.calibration_file import calibration_path

_SHOWN = 5


class FailureNote(Struct):
    """What a rank of a failed run leaves: its exit status and its machine."""

    status: Annotated[int, Meta(ge=-255, le=255)]
    host: Text


@dataclass(frozen=True)
class State:
    """The state of a run: "done", "failed", "running" or "missing".

    outcome : its repeat; empty unless done or failed.
    """

    run: Run
    word: str
    outcome: dict[str, Any] = field(default_factory=dict)


def merge_results(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Return ``results`` with the outcomes that runs have left in ``folder``, and write them.

    Runs on different kinds of machines form different groups. If the folder of all runs is gone
    (cleaned up, or not copied), the runs that were merged before stay.
    """
    runs, cleaned_up = planned_runs(folder, results), not (folder / "runs").exists()
    before = {
        repeat["folder"]: repeat
        for cell in results["cells"]
        for repeat in cell["repeats"]
        if repeat["status"] == "done" and cleaned_up
    }
    states = [_state(run, before) for run in runs]
    done = [state for state in states if state.word == "done"]
    kinds = [state.outcome["machine"] for state in done]
    machines = sorted(distinct(kinds), key=lambda kind: -kinds.count(kind))
    cells = _cells(states, machines, repeats=len(runs) // len({run.cell["id"] for run in runs}))
    if not cleaned_up:
        results["timelines"] = {}
    for cell in cells:
        for outcome in cell["repeats"]:
            take_timeline(results, cell, outcome, folder)
    environments = [
        path for state in done if (path := state.run.path / "environment.json").exists()
    ]
    groups = {str(group): machine for group, machine in enumerate(machines)}
    results |= {
        "cells": cells,
        "finished": len(done) == len(runs),
        "differences": _differences(done),
        "groups": groups if len(groups) > 1 else {},
        "environment": read_environment(environments[0])
        if environments
        else results["environment"],
    }
    to_do = [state.run for state in states if state.word in ("missing", "failed")]
    results["warnings"] = _warnings(states, to_do, results)
    results["plan"]["to_do"] = [run.number for run in to_do]
    write_results(folder / "results.json", results)
    return results


def describe_plan(folder: Path, results: dict[str, Any]) -> list[str]:
    """Return lines that say how to start the missing runs of these merged results."""
    runs = planned_runs(folder, results)
    to_do = [runs[number] for number in results["plan"]["to_do"]]
    lines = [f"{len(to_do)} of {len(runs)} runs to do in {folder}"]
    if to_do:
        slurm = (
            f"with Slurm:   {how_to_run(to_do)}"
            if IN_CHECKOUT
            else "with Slurm:   an installed copy has no job script. Plan in a checkout of "
            "the project, which has launch/slurm-compare.sbatch, or start the runs by hand"
        )
        lines = [
            f"{lines[0]}: {runs_by_nodes(to_do)}",
            slurm,
            f"by hand:      {by_hand(folder)}   # on each node of run K",
        ]
    predicted = (
        f"predicted from {calibration_path()}"
        if results["prediction"]
        else "no prediction: run lab calibrate on such nodes before the first run to have one"
    )
    return [lines[0], predicted, *lines[1:], f"at any time:  lab report {folder}"]


def why_failed(run: Run) -> str | None:
    """Return which rank failed first and its error message; None if no rank noted a failure."""
    notes = {
        int(name[1]): path
        for path in run.logs.glob("rank*.failed.json")
        if (name := re.fullmatch(r"rank(\d+)\.failed\.json", path.name)) and path.is_file()
    }
    statuses = {
        rank: read_run_file(path, FailureNote).status
        for rank, path in sorted(notes.items(), key=lambda note: note[1].stat().st_mtime_ns)
    }
    logs = {rank: output_file(run, rank) for rank in statuses}
    return describe_failure(statuses, logs) if statuses else None


def try_lock(file: IO[bytes], kind: int) -> bool:
    """Lock an open file (LOCK_EX or LOCK_SH); return False if another process holds the lock.

    True on a file system without locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _state(run: Run, before: dict[str, dict[str, Any]]) -> State:
    outcome = outcome_of(run)
    if outcome is not None:
        return State(run, "done", outcome | _where(run, outcome))
    if known := before.get(str(run.path.relative_to(run.folder))):
        return State(run, "done", known)
    log = output_file(run, 0)
    with contextlib.suppress(OSError), regular_target(log).open("rb") as file:
        if not try_lock(file, fcntl.LOCK_SH):  # the run holds it
            return State(run, "running")
    why = why_failed(run)
    if why is None and next(run.logs.glob("rank*.txt"), None) is None:
        return State(run, "missing")
    killed = (
        "the run did not report its end: it was killed, its node was lost, or it still runs and "
        f"the file system has no locks (its output: {log})"
    )
    return State(run, "failed", failed_run(run, why or killed))


def _where(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of machine that a run was on, and whether more ranks than cores shared it."""
    path = run.path / "environment.json"
    machine = read_environment(path) if path.exists() else {}
    return {
        "machine": {name: machine.get(name) for name in MACHINE_FACTS},
        "crowded": ranks_share_cores(outcome["ranks"], machine, emulated=run.settings.emulated),
    }


def _cells(
    states: Sequence[State], machines: Sequence[dict[str, Any]], *, repeats: int
) -> list[dict[str, Any]]:
    """Return all cells of the plan, then those of the other groups, with their repeats."""
    cells = {(0, state.run.cell["id"]): _empty(state.run.cell, 0) for state in states}
    for state in states:
        planned, outcome = state.run.cell, state.outcome
        if outcome:
            group = machines.index(outcome["machine"]) if state.word == "done" else 0
            cell = cells.setdefault((group, planned["id"]), _empty(planned, group))
            cell["repeats"].append(outcome)
            cell["oversubscribed"] |= outcome.get("crowded", False)
    for cell in cells.values():
        cell["repeats"].sort(key=lambda outcome: outcome["repeat"])
        summarise(cell, repeats=len(cell["repeats"]) if cell["group"] else repeats)
    return sorted(cells.values(), key=lambda cell: cell["group"])


def _empty(cell: dict[str, Any], group: int) -> dict[str, Any]:
    name = f"{cell['id']}-g{group}" if group else cell["id"]
    return cell | {"id": name, "group": group, "repeats": [], "oversubscribed": False}


def _differences(done: Sequence[State]) -> list[str]:
    """Return each fact that differs between the machines, with the runs of each value."""
    numbers = {
        name: grouped((str(state.outcome["machine"][name]), state.run.number) for state in done)
        for name in MACHINE_FACTS
    }
    return [
        f"{name}: " + "; ".join(f"{value} in runs {spans(some)}" for value, some in found.items())
        for name, found in numbers.items()
        if len(found) > 1
    ]


def _warnings(states: Sequence[State], to_do: Sequence[Run], results: dict[str, Any]) -> list[str]:
    """Return what a reader must know, and how to continue."""
    warnings = []
    by_word = grouped((state.word, state) for state in states)
    done, failed = by_word.get("done", []), by_word.get("failed", [])
    if results["groups"]:
        warnings.append(
            "the runs were on different kinds of machines. To compare all runs, remove from runs/ "
            "the folders of those on other kinds and start them again on one kind (with Slurm: "
            "sbatch --constraint or --nodelist)"
        )
    if unequal := [state.run.number for state in done if not state.outcome["equal_weights"]]:
        warnings.append(f"the ranks ended with different weights in runs {spans(unequal)}")
    calibrated = ((results["prediction"] or {}).get("calibration") or {}).get("cpu")
    cpu = results["environment"].get("cpu")
    if done and calibrated is not None and calibrated != cpu:
        warnings.append(f"the prediction is for {calibrated}, but the runs were on {cpu}")
    if len(done) < len(states):
        rest = [
            f"; {word}: {_by_cell(by_word[word])}"
            for word in ("running", "missing")
            if word in by_word
        ]
        warnings.append(f"{len(done)} of {len(states)} runs are done{''.join(rest)}")
    warnings += [
        f"failed: {name_of(state.run)}: {state.outcome['message']}" for state in failed[:_SHOWN]
    ]
    if len(failed) > _SHOWN:
        warnings.append(f"also failed: {_by_cell(failed[_SHOWN:])}")
    if to_do:
        warnings.append(f"to run them, unless they are already queued: {how_to_run(to_do)}")
    return warnings


def _by_cell(states: Sequence[State]) -> str:
    numbers = grouped((state.run.cell["id"], state.run.number) for state in states)
    return ", ".join(
        f"{cell} (run{'s' if len(some) > 1 else ''} {spans(some)})"
        for cell, some in numbers.items()
    )
