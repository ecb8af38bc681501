"""``lab report``: turn the folders of runs that were started by hand into a comparison's results.

Call ``collect``. Runs that trained different things, or ran on different machines, form different
groups. No figure mixes groups, and the report names their differences first.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.config.schema import DEFAULT_LEARNING_RATE
from common.emulation.compute_profile import Profile
from common.errors import UserError
from common.sync import STRATEGIES
from lab.compare.cells import new_cell
from lab.compare.outcomes import (
    TRAINING_FACTS,
    MachineFacts,
    RunConfig,
    read_facts,
    read_repeat,
    read_run_file,
)
from lab.compare.results import FORMAT, differences, distinct, gather
from lab.predict.bucket_choice import has_buckets


def collect(folders: Sequence[Path], *, scaling: str) -> dict[str, Any]:
    """Return the results of these runs in the format that lab/compare/results.py documents.

    UserError if a folder is missing, given twice, or without a finished run.
    """
    folders = [folder.resolve() for folder in folders]
    if len(set(folders)) < len(folders):
        raise UserError("the same run was given twice: give each folder once")
    runs = [_read(folder, scaling) for folder in folders]
    environments = [
        read_run_file(folder / "environment.json", MachineFacts, read=read_facts)
        for folder in folders
    ]
    facts, repeats = [facts for _, _, facts in runs], [repeat for _, repeat, _ in runs]
    names = ["/".join(folder.parts[-2:]) for folder in folders]
    groups, sizes = distinct(facts), distinct([one["batch_size"] for one in facts])
    cells, timelines = gather(Path(), runs, groups)
    unequal = [repeat["folder"] for repeat in repeats if not repeat["equal_weights"]]
    warnings = {
        "in some runs more ranks shared a machine than it has cores: their step times are not "
        "those of separate machines": any(repeat["crowded"] for repeat in repeats),
        "the runs were made with different commits of this project": (
            len({environment.get("git_commit") for environment in environments}) > 1
        ),
        f"the ranks ended with different weights in {', '.join(unequal)}": bool(unequal),
    }
    return {
        "format": FORMAT,
        "kind": "report",
        "created": datetime.now().isoformat(timespec="seconds"),
        "finished": True,
        "emulated": any(one["compute"] != "real" for one in facts),
        "settings": {
            "dataset": " and ".join(dict.fromkeys(str(one["dataset"]) for one in facts)),
            "model": " and ".join(dict.fromkeys(str(one["model"]) for one in facts)),
            "batch_size": sizes[0] if len(sizes) == 1 else None,
            "scaling": scaling,
            "steps": _one_or_range([repeat["timed_steps"] for repeat in repeats]),
            "warmup": _one_or_range([one["untimed_steps"] for one in facts]),
            "repeats": _one_or_range([len(cell["repeats"]) for cell in cells]),
            "seeds": sorted({repeat["seed"] for repeat in repeats}),
            "nodes": sorted({cell["nodes"] for cell in cells}),
            "sync": list(dict.fromkeys(cell["sync"] for cell in cells)),
            "rates": [None],
            "until_accuracy": None,
            "compute": facts[0]["compute"],
            "command": f"lab report {' '.join(names)}",
        },
        "environment": environments[0],
        "warnings": [sentence for sentence, applies in warnings.items() if applies],
        "differences": differences(facts, names, ", ".join),
        "prediction": None,
        "groups": {str(index): one for index, one in enumerate(groups)},
        "cells": cells,
        "timelines": timelines,
    }


def _read(folder: Path, scaling: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a run's cell, its repeat, and the facts that must agree with those of other runs."""
    if not (folder / "config.json").exists():
        runs = sorted(path.parent for path in folder.glob("*/config.json"))
        found = f". It has these: {', '.join(map(str, runs[-5:]))}" if runs else ""
        raise UserError(
            f"{folder} is not the folder of a run: it has no config.json. Give the folder that "
            f"rank 0 wrote, reports/<part>-<sync>/<time>{found}"
        )
    config = read_run_file(folder / "config.json", RunConfig, read=read_facts)
    compute, nodes = config.get("compute", "real"), config["world_size"]
    repeat = read_repeat(folder, seed=config["seed"], emulated=compute != "real")
    if len(repeat["ranks"]) != nodes:
        raise UserError(
            f"{folder} does not fit together: config.json has world_size {nodes}, ranks.json "
            f"{len(repeat['ranks'])}: copy the run again"
        )
    if compute != "real":  # name and date identify a profile
        profile = read_run_file(folder / "profile.json", Profile)
        compute = f"{profile.name} of {profile.made}"
    facts: dict[str, Any] = (
        {name: config.get(name) for name in TRAINING_FACTS}
        | repeat["machine"]
        | {"compute": compute}
    )
    facts["learning_rate"] = facts["learning_rate"] or DEFAULT_LEARNING_RATE.get(str(facts["opt"]))
    if scaling == "weak":  # an epoch has fewer steps on more nodes
        facts |= {"batch_size": facts["batch_size"] / nodes, "total_steps": None}
    sync, size = config["sync"] if nodes > 1 else "none", config.get("bucket_mb")
    if size is not None and sync in STRATEGIES and has_buckets(sync):
        sync += f"-{size if isinstance(size, str) else f'{size:g}'}"  # other buckets, another cell
    return new_cell(sync, nodes, batch_size=config["batch_size"]), repeat, facts


def _one_or_range(numbers: Sequence[int | None]) -> int | str | None:
    """Return the number that all have, ``3 to 5`` if they differ, or None if one is unknown."""
    known = sorted({number for number in numbers if number is not None})
    if None in numbers:
        return None
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
