"""The plan of a comparison: its runs by number, fixed with the prediction before any of them runs.

``plan_comparison`` makes it, a ``results.json`` whose cells are all pending and which no run writes to; ``read_plan`` and
``planned_run`` are for those who start a run, ``how_to_run`` for the reader.
"""

import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common.cost_model.calibration_file import Calibration, calibration_path, load_calibration
from common.cost_model.event_model import Network
from common.errors import UserError
from common.sync.message_cost import GradientSize
from common.utils.paths import REPOSITORY
from common.utils.source_hash import code_facts
from lab.compare.cells import Settings, profile_file, run_folder, run_name
from lab.compare.results import read_results, read_run, write_results
from lab.compare.runner import open_comparison

_RUN_BY = ("PartOne/main.py", "PartTwo/main.py", "PartThree/main.py", "lab/compare/cells.py")
_JOB_SCRIPT = Path("launch") / "slurm-compare.sbatch"


@dataclass(frozen=True)
class PlannedRun:
    """Run ``number`` of a plan: the repeat (from 0) of a cell. Nobody but this run writes to ``path`` and ``logs``."""

    folder: Path
    number: int
    settings: Settings
    cell: dict[str, Any]
    repeat: int

    @property
    def nodes(self) -> int:
        """The number of nodes that the run has."""
        return int(self.cell["nodes"])

    @property
    def name(self) -> str:
        """For a person."""
        return f"run {self.number} ({run_name(self.cell, self.repeat)})"

    @property
    def path(self) -> Path:
        """Where rank 0 writes what was measured."""
        return run_folder(self.folder, self.cell, self.repeat)

    @property
    def logs(self) -> Path:
        """Folder of the ranks' output, and of the notes on those that failed."""
        return self.folder / "logs" / f"{self.cell['id']}-{self.repeat + 1}"

    def log(self, rank: int) -> Path:
        """The file of a rank's output."""
        return self.logs / f"rank{rank}.txt"

    def failure(self, rank: int) -> Path:
        """The file that a rank writes when it has failed."""
        return self.logs / f"rank{rank}.failed.json"

    def outcome(self) -> dict[str, Any] | None:
        """What was measured, as a repeat of lab/compare/results.py; None where the run has not ended well."""
        try:
            return read_run(self.settings, self.cell, self.repeat, self.folder)
        except UserError:
            return None


def plan_comparison(
    settings: Settings, *, reports: Path, anew: bool, command: str, predicts: bool
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of a comparison whose runs others start: the newest unfinished one with the same settings and
    code, or a new one.

    predicts : from this machine's calibration, where there is one. Raises UserError on emulated links.
    """
    if settings.rates:
        raise UserError(
            f"--plan: its runs go to nodes of their own, whose links are what they are, and --rate "
            f"{' '.join(settings.rates)} is for emulated ones: leave out one of the two"
        )
    folder, results = open_comparison(
        settings, reports=reports, anew=anew, command=command, code=code_of_runs()
    )
    if (
        predicts
        and results["prediction"] is None
        and calibration_path().exists()
        and not _begun(folder)
    ):
        results["prediction"] = _predict(
            results, settings, load_calibration(calibration_path()), folder
        )
        write_results(folder / "results.json", results)
    return folder, results


def _begun(folder: Path) -> bool:
    return (folder / "logs").exists() or (folder / "runs").exists()


def code_of_runs() -> dict[str, str]:
    """Return torch's version and digests of all that a run consists of, by file: equal wherever a plan's runs may be compared."""
    files = [
        name for name in _RUN_BY if (REPOSITORY / name).is_file()
    ]  # a wheel has no PartX/main.py
    contents = {name: (REPOSITORY / name).read_bytes().replace(b"\r\n", b"\n") for name in files}
    digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in contents.items()}
    return code_facts() | digests


def _predict(
    results: dict[str, Any], settings: Settings, calibration: Calibration, folder: Path
) -> dict[str, Any]:
    """The prediction for nodes that are machines of their own. Messages that were measured over loopback, or times of another
    model, put a cell out of scope."""
    from common.emulation.compute_profile import load_profile
    from lab.compare.forecast import Link, emulated_compute_at, forecast_on_links
    from lab.predict.tables import compute_of

    gradients: Sequence[GradientSize]
    if settings.emulated:
        profile = load_profile(str(profile_file(folder)), model=settings.model)
        compute_at, gradients = emulated_compute_at(
            profile, batch_size=settings.batch_size, scaling=settings.scaling
        )
    else:
        gradients = calibration.gradients

        def compute_at(nodes: int) -> Any:
            return compute_of(
                calibration,
                nodes,
                batch_size=settings.batch_size,
                scaling=settings.scaling,
                own_machines=True,
            )

    networks: dict[Link, Network] = {
        (nodes, None): calibration.network for nodes in settings.nodes if nodes > 1
    }
    found = forecast_on_links(
        results,
        networks,
        compute_at,
        gradients,
        settings.strategy_options,
        source=f"calibrated on {calibration.name}, {calibration.made}",
    )
    other_model = calibration.model != settings.model and not settings.emulated
    for cell in results["cells"]:
        why = f"calibrated with {calibration.model}" if other_model else ""
        if calibration.over_loopback and cell["nodes"] > 1:
            why = "calibrated over loopback, no network"
        predicted = found["cells"].get(cell["id"])
        if why and predicted is not None and predicted["in_scope"]:
            predicted |= {"in_scope": False, "why": why}
    found["calibration"]["cpu"] = str(calibration.machine.get("cpu"))
    return found


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the results of a planned comparison; UserError where the folder is not there or holds no plan."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not there on {os.uname().nodename}: the folder of a plan belongs on a file system that all "
            "nodes share (lab compare --output-dir)"
        )
    if not (folder / "results.json").exists():
        raise UserError(
            f"{folder} is no plan (it has no results.json): make one by lab compare --plan"
        )
    results = read_results(folder / "results.json")
    check_plan(folder, results)
    return results


def check_plan(folder: Path, results: dict[str, Any]) -> None:
    """Raise UserError where these are not the results of a plan."""
    if "plan" not in results:
        raise UserError(
            f"{folder} is a comparison, but no plan, and its runs are lab compare's own: give the folder of a "
            "lab compare --plan"
        )
    plan, cells = results["plan"], {cell["id"] for cell in results["cells"]}
    try:
        good = isinstance(plan["code"], dict) and all(
            cell in cells and isinstance(repeat, int) for cell, repeat in plan["runs"]
        )
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise UserError(
            f"{folder / 'results.json'}: the plan in it is damaged; plan anew with lab compare --plan --new"
        )


def planned_runs(folder: Path, results: dict[str, Any]) -> list[PlannedRun]:
    """Return all runs of a plan, by number."""
    settings = Settings.from_json(results["settings"])
    cells = {cell["id"]: cell for cell in results["cells"]}
    return [
        PlannedRun(folder, number, settings, cells[cell], repeat)
        for number, (cell, repeat) in enumerate(results["plan"]["runs"])
    ]


def planned_run(folder: Path, number: int) -> tuple[PlannedRun, dict[str, str]]:
    """Return a run of the plan in ``folder`` by its number, and the code that it needs; UserError where there is none."""
    results = read_plan(folder)
    runs = planned_runs(folder, results)
    if not 0 <= number < len(runs):
        raise UserError(f"--run: got {number}, the plan in {folder} has runs 0 to {len(runs) - 1}")
    return runs[number], results["plan"]["code"]


def how_to_run(runs: Sequence[PlannedRun]) -> str:
    """Return the command that submits these runs, one after the other, to a cluster with Slurm."""
    here = Path.cwd()
    paths = [
        path.relative_to(here) if path.is_relative_to(here) else path
        for path in (REPOSITORY / _JOB_SCRIPT, runs[0].folder.resolve())
    ]
    return shlex.join(
        [
            "sbatch",
            f"--nodes={max(run.nodes for run in runs)}",
            f"--array={spans([run.number for run in runs])}%1",
            *map(str, paths),
        ]
    )


def runs_by_nodes(runs: Sequence[PlannedRun]) -> str:
    """Return which runs have how many nodes, for a person."""
    return "; ".join(
        f"on {nodes} node{'s' if nodes > 1 else ''} {spans([run.number for run in runs if run.nodes == nodes])}"
        for nodes in sorted({run.nodes for run in runs})
    )


def spans(numbers: Sequence[int]) -> str:
    """Return rising numbers in short, e.g. "0-3,5"."""
    found = []
    for _, members in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(found)
