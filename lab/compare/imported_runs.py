"""``lab report``: turn the folders of runs that were started by hand into a comparison's results.

Call ``collect``. Runs that trained different things, or ran on different machines, form different
groups. No figure mixes groups, and the report names their differences first.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.emulation.compute_profile import Profile
from common.errors import UserError
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from lab.compare.cells import new_cell
from lab.compare.outcomes import (
    MACHINE_FACTS,
    TRAINING_FACTS,
    ranks_share_cores,
    read_environment,
    read_repeat,
    read_run_file,
    read_settings,
)
from lab.compare.results import FORMAT, distinct, summarise, take_timeline
from lab.predict.bucket_choice import has_buckets

_DEFAULTS = {"flip": "random", "cutout": 0, "tta": "none"}  # of runs that had no such setting


def collect(folders: Sequence[Path], *, scaling: str) -> dict[str, Any]:
    """Return the results of these runs in the format that lab/compare/results.py documents.

    UserError if a folder is missing, given twice, or without a finished run.
    """
    folders = [folder.resolve() for folder in folders]
    if len(set(folders)) < len(folders):
        raise UserError("the same run was given twice: give each folder once")
    runs = [_read(folder, scaling) for folder in folders]
    facts = [run["facts"] for run in runs]
    differing = [name for name in facts[0] if any(one[name] != facts[0][name] for one in facts)]
    groups = distinct(facts)
    cells, timelines = _cells(runs, groups)
    return {
        "format": FORMAT,
        "kind": "report",
        "created": datetime.now().isoformat(timespec="seconds"),
        "finished": True,
        "emulated": any(one["compute"] != "real" for one in facts),
        "settings": _settings(runs, cells, scaling),
        "environment": runs[0]["environment"],
        "warnings": _warnings(runs),
        "differences": [_difference(name, runs) for name in differing],
        "prediction": None,
        "groups": {str(index): one for index, one in enumerate(groups)},
        "cells": cells,
        "timelines": timelines,
    }


def _read(folder: Path, scaling: str) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        runs = sorted(path.parent for path in folder.glob("*/config.json"))
        found = f". It has these: {', '.join(map(str, runs[-5:]))}" if runs else ""
        raise UserError(
            f"{folder} is not the folder of a run: it has no config.json. Give the folder that "
            f"rank 0 wrote, reports/<part>-<sync>/<time>{found}"
        )
    config = read_settings(folder / "config.json")
    environment = read_environment(folder / "environment.json")
    repeat = read_repeat(folder, seed=config["seed"])
    if len(repeat["ranks"]) != config["world_size"]:
        raise UserError(
            f"{folder} does not fit together: config.json has world_size {config['world_size']}, "
            f"ranks.json {len(repeat['ranks'])}: copy the run again"
        )
    facts: dict[str, Any] = (
        {name: config.get(name, _DEFAULTS.get(name)) for name in TRAINING_FACTS}
        | {name: environment.get(name) for name in MACHINE_FACTS}
        | {"compute": _compute(folder, config)}
    )
    if scaling == "weak":
        facts["batch_size"] /= config["world_size"]
        facts["total_steps"] = None  # an epoch has fewer steps on more nodes
    return {
        "folder": folder,
        "sync": _strategy(config) if config["world_size"] > 1 else "none",
        "nodes": config["world_size"],
        "batch_size": config["batch_size"],
        "facts": facts,
        "repeat": repeat,
        "environment": environment,
        "crowded": ranks_share_cores(
            repeat["ranks"], environment, emulated=facts["compute"] != "real"
        ),
    }


def _strategy(config: Mapping[str, Any]) -> str:
    """Return the name of the strategy's cell; other buckets have a cell of their own."""
    sync, size = config["sync"], config.get("bucket_mb")
    if size is None or sync not in STRATEGIES or not has_buckets(sync):
        return sync
    return f"{sync}-{size if isinstance(size, str) else f'{size:g}'}"


def _cells(
    runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the cells of these runs in order, and the timelines by the cells' ids."""
    cells: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {"timelines": {}}
    for run in runs:
        new = new_cell(
            run["sync"],
            run["nodes"],
            batch_size=run["batch_size"],
            group=groups.index(run["facts"]),
        )
        cell = cells.setdefault(new["id"], new | {"oversubscribed": run["crowded"]})
        outcome = run["repeat"] | {"repeat": len(cell["repeats"])}
        cell["repeats"].append(outcome)
        take_timeline(results, cell, outcome, run["folder"])
    for cell in cells.values():
        summarise(cell, repeats=len(cell["repeats"]))
    ordered = sorted(cells.values(), key=lambda cell: (cell["group"], cell["nodes"]))
    return ordered, results["timelines"]


def _compute(folder: Path, config: Mapping[str, Any]) -> str:
    """Return "real", or name and date of the profile of emulated compute, which identify it."""
    if config.get("compute", "real") == "real":
        return "real"
    profile = read_run_file(folder / "profile.json", Profile)
    return f"{profile.name} of {profile.made}"


def _difference(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a fact that differs between runs, with the runs of each value."""
    owners = grouped((str(run["facts"][name]), _short_name(run)) for run in runs)
    return f"{name}: " + "; ".join(f"{value} in {', '.join(who)}" for value, who in owners.items())


def _short_name(run: Mapping[str, Any]) -> str:
    return "/".join(run["folder"].parts[-2:])


def _warnings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    unequal = [str(run["folder"]) for run in runs if not run["repeat"]["equal_weights"]]
    warnings = {
        "in some runs more ranks shared a machine than it has cores: their step times are not "
        "those of separate machines": any(run["crowded"] for run in runs),
        "the runs were made with different commits of this project": (
            len({run["environment"].get("git_commit") for run in runs}) > 1
        ),
        f"the ranks ended with different weights in {', '.join(unequal)}": bool(unequal),
    }
    return [sentence for sentence, applies in warnings.items() if applies]


def _settings(
    runs: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]], scaling: str
) -> dict[str, Any]:
    facts = runs[0]["facts"]
    return {
        "dataset": facts["dataset"],
        "model": facts["model"],
        "batch_size": runs[0]["batch_size"] if scaling == "strong" else facts["batch_size"],
        "scaling": scaling,
        "steps": _one_or_range([run["repeat"]["timed_steps"] for run in runs]),
        "warmup": _one_or_range([run["facts"]["untimed_steps"] for run in runs]),
        "repeats": _one_or_range([len(cell["repeats"]) for cell in cells]),
        "seeds": sorted({run["repeat"]["seed"] for run in runs}),
        "nodes": sorted({cell["nodes"] for cell in cells}),
        "sync": list(dict.fromkeys(cell["sync"] for cell in cells)),
        "rates": [None],
        "until_accuracy": None,
        "compute": facts["compute"],
        "command": "lab report " + " ".join(map(_short_name, runs)),
    }


def _one_or_range(numbers: Sequence[int | None]) -> int | str | None:
    """Return the number that all have, ``3 to 5`` if they differ, or None if one is unknown."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    return known[0] if min(known) == max(known) else f"{min(known)} to {max(known)}"
