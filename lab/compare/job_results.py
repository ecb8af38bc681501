"""Merge what the runs of a plan have written so far into ``results.json``; its warnings name what is missing or failed.

``merge_results`` may be called at any moment, also while runs are under way; it alone writes ``results.json``. ``why_failed``
is also what a run prints at its end.
"""

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.processes import find_root_failure
from lab.compare.job_plan import PlannedRun, check_plan, how_to_run, planned_runs, spans
from lab.compare.results import failed_run, read_json, summarise, take_timeline, write_results

_MACHINE = ("cpu", "gpus", "torch", "usable_cores")
_SHOWN = 5


@dataclass(frozen=True)
class State:
    """How far a run is: "done", "failed", "under way" or "missing". ``outcome`` is its repeat, empty unless done or failed."""

    run: PlannedRun
    word: str
    outcome: dict[str, Any] = field(default_factory=dict)


def merge_results(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the plan in ``folder`` with what its runs have left there, and write them to ``results.json``.

    results : as ``read_results`` returned them. Runs on different kinds of machines come into different groups. Where the folder
    of all runs is gone (cleaned up, or not copied), those that were merged before stay.
    """
    check_plan(folder, results)
    runs = planned_runs(folder, results)
    before = {
        repeat["folder"]: repeat
        for cell in results["cells"]
        for repeat in cell["repeats"]
        if repeat["status"] == "done" and not (folder / "runs").exists()
    }
    states = [_state(run, before) for run in runs]
    done = [state for state in states if state.word == "done"]
    machines = _machines(done)
    cells = _cells(states, machines, repeats=len(runs) // len({run.cell["id"] for run in runs}))
    results["timelines"] = {} if (folder / "runs").exists() else results["timelines"]
    for cell in cells:
        for outcome in cell["repeats"]:
            take_timeline(results, cell, outcome, folder)
    environments = [
        path for state in done if (path := state.run.path / "environment.json").exists()
    ]
    results |= {
        "cells": cells,
        "finished": len(done) == len(runs),
        "differences": _differences(done),
        "groups": {str(group): machine for group, machine in enumerate(machines)}
        if len(machines) > 1
        else {},
        "environment": read_json(environments[0]) if environments else results["environment"],
    }
    results["warnings"] = _warnings(states, results)
    results["plan"]["to_do"] = [run.number for run in _to_do(states)]
    write_results(folder / "results.json", results)
    return results


def why_failed(run: PlannedRun) -> str | None:
    """Return which rank of a run failed first and its error message; None where no rank has noted a failure."""
    notes = sorted(run.logs.glob("rank*.failed.json"), key=lambda path: path.stat().st_mtime_ns)
    statuses = {
        int(path.name[len("rank") :].split(".")[0]): read_json(path)["status"] for path in notes
    }
    if not statuses:
        return None
    logs = {rank: run.log(rank) for rank in statuses}
    texts = {
        rank: log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        for rank, log in logs.items()
    }
    culprit, message = find_root_failure(list(statuses), statuses, texts, name="rank")
    return f"{message} (its output: {run.log(culprit)})"


def _state(run: PlannedRun, before: dict[str, dict[str, Any]]) -> State:
    outcome = run.outcome()
    if outcome is not None:
        return State(run, "done", outcome | _where(run, outcome))
    if known := before.get(str(run.path.relative_to(run.folder))):
        return State(run, "done", known)
    if _held(run.log(0)):
        return State(run, "under way")
    why = why_failed(run)
    if why is None and next(run.logs.glob("rank*.txt"), None) is not None:
        why = (
            f"no end was noted: killed, or its node lost; or still under way, where the nodes' file system has no locks (its "
            f"output: {run.log(0)})"
        )
    if why is None:
        return State(run, "missing")
    return State(
        run, "failed", failed_run(run.settings, run.cell, run.repeat, run.folder, message=why)
    )


def _held(log: Path) -> bool:
    """Whether the run that writes this log is under way."""
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks
        return False
    return False


def _where(run: PlannedRun, outcome: dict[str, Any]) -> dict[str, Any]:
    """Return on which kind of machine a run was, and whether more ranks than cores shared it."""
    try:
        machine = read_json(run.path / "environment.json")
    except UserError:
        machine = {}
    hosts = [rank["host"] for rank in outcome["ranks"]]
    crowded = (
        not run.settings.emulated
        and not machine.get("gpus")
        and max(map(hosts.count, hosts)) > machine.get("usable_cores", len(hosts))
    )
    return {"machine": {name: machine.get(name) for name in _MACHINE}, "crowded": crowded}


def _machines(done: Sequence[State]) -> list[dict[str, Any]]:
    """The kinds of machines, the one of most runs first."""
    kinds = [state.outcome["machine"] for state in done]
    different = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    return sorted(different, key=lambda kind: -kinds.count(kind))


def _cells(
    states: Sequence[State], machines: Sequence[dict[str, Any]], *, repeats: int
) -> list[dict[str, Any]]:
    """All cells of the plan, and those of other groups than the first with the repeats that they have."""
    cells: dict[tuple[int, str], dict[str, Any]] = {}
    for state in states:
        name, outcome = state.run.cell["id"], state.outcome
        cells.setdefault((0, name), _empty(state.run.cell, name, 0))
        if not outcome:
            continue
        group = machines.index(outcome["machine"]) if state.word == "done" else 0
        cell = cells.setdefault((group, name), _empty(state.run.cell, f"{name}-g{group}", group))
        cell["repeats"].append(outcome)
        cell["oversubscribed"] = cell["oversubscribed"] or outcome.get("crowded", False)
    for cell in cells.values():
        cell["repeats"].sort(key=lambda outcome: outcome["repeat"])
        summarise(cell, repeats=len(cell["repeats"]) if cell["group"] else repeats)
    return sorted(cells.values(), key=lambda cell: cell["group"])


def _empty(cell: dict[str, Any], name: str, group: int) -> dict[str, Any]:
    return cell | {"id": name, "group": group, "repeats": [], "oversubscribed": False}


def _differences(done: Sequence[State]) -> list[str]:
    """What is not the same on all machines, with which runs were where."""
    differences = []
    for name in _MACHINE:
        values: dict[str, list[int]] = {}
        for state in done:
            values.setdefault(str(state.outcome["machine"][name]), []).append(state.run.number)
        if len(values) > 1:
            runs = [f"{value} in runs {spans(numbers)}" for value, numbers in values.items()]
            differences.append(f"{name}: {'; '.join(runs)}")
    return differences


def _warnings(states: Sequence[State], results: dict[str, Any]) -> list[str]:
    """What a reader must know, and how to go on."""
    warnings = []
    done, under_way, missing, failed = (
        [state for state in states if state.word == word]
        for word in ("done", "under way", "missing", "failed")
    )
    if results["groups"]:
        warnings.append(
            "the runs were on different kinds of machines; for one group of all, remove the folders in runs/ of those on "
            "the others, and start these again on one kind (with Slurm: sbatch --constraint or --nodelist)"
        )
    if unequal := [state.run.number for state in done if not state.outcome["equal_weights"]]:
        warnings.append(f"the ranks ended with different weights in runs {spans(unequal)}")
    calibrated = ((results["prediction"] or {}).get("calibration") or {}).get("cpu")
    if done and calibrated is not None and calibrated != results["environment"].get("cpu"):
        warnings.append(
            f"the prediction is for {calibrated}, the runs were on {results['environment'].get('cpu')}"
        )
    if len(done) < len(states):
        warnings.append(
            f"{len(done)} of {len(states)} runs are done"
            + "".join(
                f"; {word}: {_by_cell(some)}"
                for word, some in (("under way", under_way), ("missing", missing))
                if some
            )
        )
    warnings += [
        f"failed: {state.run.name}: {state.outcome['message']}" for state in failed[:_SHOWN]
    ]
    if len(failed) > _SHOWN:
        warnings.append(f"failed, too: {_by_cell(failed[_SHOWN:])}")
    if to_do := _to_do(states):
        warnings.append(f"to go on, unless they wait in a queue: {how_to_run(to_do)}")
    return warnings


def _to_do(states: Sequence[State]) -> list[PlannedRun]:
    return [state.run for state in states if state.word in ("missing", "failed")]


def _by_cell(states: Sequence[State]) -> str:
    numbers: dict[str, list[int]] = {}
    for state in states:
        numbers.setdefault(state.run.cell["id"], []).append(state.run.number)
    return ", ".join(
        f"{cell} (run{'s' if len(some) > 1 else ''} {spans(some)})"
        for cell, some in numbers.items()
    )
