"""Plan a comparison whose runs other programs start, such as a scheduler.

``plan_comparison`` numbers the runs, predicts, and writes a ``results.json`` whose cells are all
pending. No run writes to that file. A node of a run calls ``planned_run``; ``how_to_run`` tells a
person how to start the runs.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from common.config.schema import Config, flag
from common.errors import UserError
from common.utils.grouping import grouped
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.source_hash import code_facts
from common.utils.typed_json import shown
from lab.compare.cells import Run, choose_buckets, plan_cells
from lab.compare.outcomes import read_run
from lab.compare.results import read_results, write_results
from lab.compare.runner import open_comparison
from lab.compare.settings import Settings
from lab.predict.calibration_file import calibration_path, load_calibration

_RUN_BY = (
    "PartOne/main.py",
    "PartTwo/main.py",
    "PartThree/main.py",
    "lab/compare/cells.py",
    "lab/compare/settings.py",
)
_JOB_SCRIPT = Path("launch") / "slurm-compare.sbatch"
_FROM_THE_SETTINGS = ("sync", "nodes", "rate", "batch_size")
_ELSEWHERE = ("compute", "log_wandb")  # a file of this machine, a service with this user's account


def plan_comparison(
    settings: Settings, *, reports: Path, anew: bool, command: str, predicts: bool
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of a planned comparison.

    It is the newest unfinished one with the same settings and code, or a new one.

    predicts : predict from this machine's calibration, if there is one and no run has begun.
    Raises UserError if the settings ask for emulated links, or have flags that no plan may have.
    """
    _check_flags(settings, name="the flags after --")
    if settings.rates:
        raise UserError(
            "--plan runs on real nodes, whose links cannot be set, and --rate "
            f"{' '.join(settings.rates)} needs emulated nodes: leave out one of the two"
        )
    folder, results = open_comparison(
        settings, reports=reports, anew=anew, command=command, code=code_of_runs()
    )
    begun = any((folder / name).exists() for name in ("logs", "runs"))
    predicts = predicts and results["prediction"] is None and not begun
    if predicts and calibration_path().exists():
        from lab.compare.prediction import predict_plan

        calibration = load_calibration(calibration_path())
        results["prediction"] = predict_plan(results, settings, folder, calibration)
    for line in choose_buckets(results):
        print(line)
    write_results(folder / "results.json", results)
    return folder, results


def code_of_runs() -> dict[str, str]:
    """Return torch's version and a digest of each file that a run uses.

    Times of two nodes are comparable only if all of these are equal.
    """
    paths = [REPOSITORY / name for name in _RUN_BY]
    digests = {
        name: hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:12]
        for name, path in zip(_RUN_BY, paths, strict=True)
        if path.is_file()  # a wheel has no PartX/main.py
    }
    return dict(sorted((code_facts() | digests).items()))


def planned_runs(folder: Path, results: dict[str, Any]) -> list[Run]:
    """Return all runs of a plan, by number. UserError unless these are the results of a plan."""
    if "plan" not in results:
        raise UserError(
            f"{folder} is a comparison that lab compare runs itself, not a plan: give a folder "
            "that lab compare --plan made"
        )
    file = folder / "results.json"
    settings = Settings.from_json(results["settings"], name=f"{file}: settings")
    _check_flags(settings, name=f"{file}: settings: flags")
    cells = {cell["id"]: cell for cell in results["cells"]}
    planned = {cell["id"]: cell for cell in plan_cells(settings)}
    runs = results["plan"]["runs"]
    if any(
        cell not in cells
        or cell not in planned
        or any(cells[cell][name] != planned[cell][name] for name in _FROM_THE_SETTINGS)
        or repeat >= len(settings.seeds_to_run)
        for cell, repeat in runs
    ):
        raise UserError(
            f"{file}: the plan in it is damaged; make a new one by lab compare --plan --new"
        )
    return [
        Run(folder, settings, cells[cell], repeat, number)
        for number, (cell, repeat) in enumerate(runs)
    ]


def _check_flags(settings: Settings, *, name: str) -> None:
    """Raise UserError unless the flags are settings of the training, equal on all ranks.

    A plan may come from somebody else. It must not choose the files that a run reads and writes on
    this machine, or the hosts that it contacts.
    """
    allowed = {
        one
        for spec in fields(Config)
        if spec.metadata
        and spec.metadata["in_recipe"]
        and (not spec.metadata["per_rank"] or spec.name in ("threads", "debug"))
        and spec.name not in _ELSEWHERE
        for one in (flag(spec.name), *spec.metadata["flags"])
    }
    for word in settings.flags:
        long = re.sub("^--no-", "--", word.partition("=")[0].replace("_", "-"))
        if word.startswith("-") and long not in allowed:
            raise UserError(
                f"{name}: got {shown(word)}, but a plan may only have flags of the training that "
                "are equal on all nodes, such as --amp or --threads 2: leave it out"
            )


def planned_run(folder: Path, number: int) -> tuple[Run, dict[str, str]]:
    """Return run ``number`` of the plan in ``folder`` and its code. UserError if there is none."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist on {os.uname().nodename}: put the plan on a file system that "
            "all nodes share (lab compare --plan --output-dir DIR)"
        )
    if not (folder / "results.json").exists():
        raise UserError(
            f"{folder} is no plan (it has no results.json): make one with lab compare --plan"
        )
    results = read_results(folder / "results.json")
    runs = planned_runs(folder, results)
    if not 0 <= number < len(runs):
        raise UserError(f"--run: got {number}, the plan in {folder} has runs 0 to {len(runs) - 1}")
    return runs[number], results["plan"]["code"]


def refuse_links(run: Run, rank: int) -> None:
    """Raise UserError if what a rank of ``run`` writes or removes is reached through a link.

    The plan may come from somebody else. The links on the way to its folder are the user's own.
    """
    folder = os.path.realpath(run.folder)
    for path in (run.path, output_file(run, rank), failure_file(run, rank)):
        if os.path.realpath(path) != os.path.join(folder, path.relative_to(run.folder)):
            raise UserError(
                f"{path} leads elsewhere through a link: remove the link, or make a new plan"
            )


def name_of(run: Run) -> str:
    """Return a planned run's number and title, for a person."""
    return f"run {run.number} ({run.title})"


def output_file(run: Run, rank: int) -> Path:
    """Return the file of a rank's output."""
    return run.logs / f"rank{rank}.txt"


def failure_file(run: Run, rank: int) -> Path:
    """Return the file that a rank writes when it has failed."""
    return run.logs / f"rank{rank}.failed.json"


def outcome_of(run: Run) -> dict[str, Any] | None:
    """Return what the run measured, as a repeat; None unless it has succeeded."""
    try:
        return read_run(run)
    except UserError:
        return None


def how_to_run(runs: Sequence[Run]) -> str:
    """Return the command that runs these one after the other: with Slurm, or by hand.

    An installed copy of the project has no script for Slurm.
    """
    nodes, numbers = max(run.nodes for run in runs), spans([run.number for run in runs])
    if not IN_CHECKOUT:
        return f"{by_hand(runs[0].folder.resolve())} with K = {numbers}"
    here = Path.cwd()
    paths = [
        path.relative_to(here) if path.is_relative_to(here) else path
        for path in (REPOSITORY / _JOB_SCRIPT, runs[0].folder.resolve())
    ]
    return shlex.join(["sbatch", f"--nodes={nodes}", f"--array={numbers}%1", *map(str, paths)])


def by_hand(folder: Path) -> str:
    """Return the command that starts run K on each of its nodes."""
    return f"lab run-cell {shlex.quote(str(folder))} --run K --master-ip IP --num-nodes N --rank R"


def runs_by_nodes(runs: Sequence[Run]) -> str:
    """Return which runs have how many nodes, for a person."""
    numbers = grouped((run.nodes, run.number) for run in runs)
    return "; ".join(
        f"on {nodes} node{'s' if nodes > 1 else ''}: {spans(numbers[nodes])}"
        for nodes in sorted(numbers)
    )


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, e.g. "0-3,5"."""
    found = []
    for _, members in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(found)
