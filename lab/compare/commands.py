"""What ``lab compare`` and ``lab report`` do: calibrate and predict, run the comparison or plan it, write the report."""

from pathlib import Path
from typing import Any

from rich.console import Console

from common.cost_model.calibration_file import Calibration, calibration_path, describe
from common.errors import INTERRUPTED, UserError
from common.utils.paths import new_folder
from lab.compare.cells import Settings
from lab.compare.executors import Executors
from lab.compare.imported_runs import collect
from lab.compare.results import read_results, write_results
from lab.compare.runner import compare
from lab.report import write_report

console = Console(highlight=False)


def compare_and_report(
    settings: Settings, *, reports: Path, anew: bool, predicts: bool, command: str
) -> int:
    """Predict, run the comparison and write its report; also what is finished at Ctrl-C. Return the exit status: 1 where a cell
    failed."""
    status = 0
    opened: list[Path] = []

    def predict(results: dict[str, Any], folder: Path, executors: Executors) -> None:
        results["prediction"] = _forecast(results, settings, folder, executors)

    try:
        folder, results = compare(
            settings,
            reports=reports,
            anew=anew,
            predict=predict if predicts else None,
            command=command,
            opened=opened.append,
        )
    except KeyboardInterrupt:
        if not opened:
            raise
        folder, status = opened[0], INTERRUPTED
        results = read_results(folder / "results.json")
        console.print(
            f"interrupted; every process is ended, what is finished is kept. The same command goes on with {folder}",
            soft_wrap=True,
        )
    write_report(folder, results)
    failed = [
        cell["id"]
        for cell in results["cells"]
        if any(one["status"] == "failed" for one in cell["repeats"])
    ]
    if failed:
        console.print(
            f"failed: {', '.join(failed)}; the same command tries them again", soft_wrap=True
        )
    _print_table(folder)
    return status or (1 if failed else 0)


def plan_runs(
    settings: Settings, *, reports: Path, anew: bool, predicts: bool, command: str
) -> int:
    """Plan a comparison whose runs others start, or find the unfinished plan of the same; say how to start what is missing."""
    from lab.compare.job_plan import how_to_run, plan_comparison, planned_runs, runs_by_nodes
    from lab.compare.job_results import merge_results

    folder, results = plan_comparison(
        settings, reports=reports, anew=anew, command=command, predicts=predicts
    )
    results = merge_results(folder, results)
    runs = planned_runs(folder, results)
    to_do = [runs[number] for number in results["plan"]["to_do"]]
    lines = [
        f"{len(to_do)} of {len(runs)} runs to do, in {folder}"
        + (f": {runs_by_nodes(to_do)}" if to_do else ""),
        f"predicted from {calibration_path()}"
        if results["prediction"]
        else "not predicted: that takes a calibration of such nodes (lab calibrate), before the first run",
    ]
    if to_do:
        lines += [
            f"with Slurm:   {how_to_run(to_do)}",
            f"by hand:      lab run-cell {folder} --run K --master-ip IP --num-nodes N --rank R   # on each of its nodes",
        ]
    for line in [*lines, f"at any time:  lab report {folder}"]:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _forecast(
    results: dict[str, Any], settings: Settings, folder: Path, executors: Executors
) -> dict[str, Any]:
    """Measure now, since a machine is not equally fast every day, and predict."""
    options = settings.strategy_options
    calibration = None if settings.emulated else _calibrate_for(results, settings, folder)
    if calibration is not None and not settings.rates:
        from lab.compare.forecast import forecast

        return forecast(results, calibration, options)
    from lab.compare.forecast import forecast_on_nodes

    console.print(
        "measuring messages on the nodes, for the predictions (--no-predict leaves them out)",
        soft_wrap=True,
    )
    return forecast_on_nodes(results, settings, folder, executors, options, calibration)


def _calibrate_for(results: dict[str, Any], settings: Settings, folder: Path) -> Calibration:
    """Calibrate this machine, and say what was found."""
    from lab.calibrate.calibration import calibrate

    console.print(
        "calibrating this machine first, for the predictions (--no-predict leaves them out)",
        soft_wrap=True,
    )
    calibration = calibrate(model=settings.model, path=folder / "calibration.json")
    for line in describe(calibration):
        console.print(line, markup=False, soft_wrap=True)
        if line.startswith("warning: "):
            results["warnings"].append(f"of the calibration: {line.removeprefix('warning: ')}")
    return calibration


def report_on(runs: list[Path], *, reports: Path, scaling: str) -> int:
    """Write the report of runs that were started by hand, or again that of one comparison, in its own folder."""
    comparisons = [run for run in runs if (run / "results.json").exists()]
    if comparisons and len(runs) > 1:
        raise UserError(f"{comparisons[0]} is a comparison: give it alone, or folders of runs")
    if comparisons:
        folder = comparisons[0]
        results = read_results(folder / "results.json")
        if "plan" in results:
            from lab.compare.job_results import merge_results

            results = merge_results(folder, results)
            for warning in results["warnings"]:
                console.print(warning, markup=False, soft_wrap=True)
    else:
        results = collect(runs, scaling=scaling)
        folder = new_folder(reports, "report")
        write_results(folder / "results.json", results)
    for difference in results["differences"]:
        console.print(f"not comparable: {difference}", soft_wrap=True)
    write_report(folder, results)
    _print_table(folder)
    return 0


def _print_table(folder: Path) -> None:
    console.print((folder / "table.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
