"""What the subcommands of ``lab`` do, put together from the rooms beside: compare and report, report alone, calibrate."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from common.compute_profile import MEASURED
from common.errors import UserError
from lab.calibration import Calibration, calibration_path, describe
from lab.cells import Settings
from lab.compare import compare, new_folder
from lab.places import Places
from lab.report import write_report
from lab.results import read_results, write_results
from lab.runs import collect

_INTERRUPTED = 130

console = Console(highlight=False)


def compare_and_report(settings: Settings, *, reports: Path, anew: bool, predicts: bool, command: str) -> int:
    """Predict, run the comparison and write its report; also what is finished at Ctrl-C. Return the exit status: 1 where a cell
    failed."""
    status, opened = 0, []

    def predict(results: dict[str, Any], folder: Path, places: Places) -> None:
        results["prediction"] = _forecast(results, settings, folder, places)

    try:
        folder, results = compare(settings, reports=reports, anew=anew, predict=predict if predicts else None,
                                  command=command, opened=opened.append)
    except KeyboardInterrupt:
        if not opened:
            raise
        folder, status = opened[0], _INTERRUPTED
        results = read_results(folder / "results.json")
        console.print(f"interrupted; every process is ended, what is finished is kept. The same command goes on with {folder}",
                      soft_wrap=True)
    write_report(folder, results)
    failed = [cell["id"] for cell in results["cells"] if any(one["status"] == "failed" for one in cell["repeats"])]
    if failed:
        console.print(f"failed: {', '.join(failed)}; the same command tries them again", soft_wrap=True)
    _say_where(folder)
    return status or (1 if failed else 0)


def plan_runs(settings: Settings, *, reports: Path, anew: bool, predicts: bool, command: str) -> int:
    """Plan a comparison whose runs others start, or find the unfinished plan of the same; say how to start what is missing."""
    from lab.jobs.plan import how_to_run, plan_comparison, planned_runs, runs_by_nodes
    from lab.jobs.together import put_together

    folder, results = plan_comparison(settings, reports=reports, anew=anew, command=command, predicts=predicts)
    results = put_together(folder, results)
    runs = planned_runs(folder, results)
    to_do = [runs[number] for number in results["plan"]["to_do"]]
    lines = [f"{len(to_do)} of {len(runs)} runs to do, in {folder}" + (f": {runs_by_nodes(to_do)}" if to_do else ""),
             f"predicted from {calibration_path()}" if results["prediction"] else
             "not predicted: that takes a calibration of such nodes (lab calibrate), before the first run"]
    if to_do:
        lines += [f"with Slurm:   {how_to_run(to_do)}",
                  f"by hand:      lab run-cell {folder} --run K --master-ip IP --num-nodes N --rank R   # on each of its nodes"]
    for line in [*lines, f"at any time:  lab report {folder}"]:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _forecast(results: dict[str, Any], settings: Settings, folder: Path, places: Places) -> dict[str, Any]:
    """Measure now, since a machine is not every day the same, and predict."""
    options = settings.strategy_options
    calibration = None if settings.emulated else _calibrate_for(results, settings, folder)
    if calibration is not None and not settings.rates:
        from lab.forecast import forecast

        return forecast(results, calibration, options)
    from lab.forecast import forecast_on_nodes

    console.print("measuring messages on the nodes, for the predictions (--no-predict leaves them out)", soft_wrap=True)
    return forecast_on_nodes(results, settings, folder, places, options, calibration)


def _calibrate_for(results: dict[str, Any], settings: Settings, folder: Path) -> Calibration:
    """Calibrate this machine, and say what was found."""
    from lab.calibrate import calibrate

    console.print("calibrating this machine first, for the predictions (--no-predict leaves them out)", soft_wrap=True)
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
            from lab.jobs.together import put_together

            results = put_together(folder, results)
            for warning in results["warnings"]:
                console.print(warning, markup=False, soft_wrap=True)
    else:
        results = collect(runs, scaling=scaling)
        folder = new_folder(reports, "report")
        write_results(folder / "results.json", results)
    for difference in results["differences"]:
        console.print(f"not comparable: {difference}", soft_wrap=True)
    write_report(folder, results)
    _say_where(folder)
    return 0


def _say_where(folder: Path) -> None:
    console.print((folder / "table.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def calibrate_machine(args: argparse.Namespace) -> int:
    """Calibrate this machine and its layers, or be one rank of several nodes that calibrate; with ``--profile`` layers alone."""
    from lab.calibrate import calibrate, calibrate_nodes

    path = args.output or calibration_path()
    place = (args.master_ip, args.num_nodes, args.rank)
    if args.profile is not None:
        return _profile_layers(args, args.profile)
    if args.device != "cpu":
        raise UserError(f"--device {args.device}: name its profile, e.g. --profile my-gpu; no messages are measured there")
    if place == (None, None, None):
        calibration = calibrate(ranks=args.ranks, model=args.model, quick=args.quick, path=path)
    elif None in place:
        raise UserError("--master-ip, --num-nodes and --rank go together: give all three, or none for this machine alone")
    else:
        from common.place import Launch

        if not 0 <= args.rank < args.num_nodes:
            raise UserError(f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; give 0 to {args.num_nodes - 1}")
        calibration = calibrate_nodes(Launch(args.rank, args.num_nodes, args.master_ip, args.master_port), model=args.model,
                                      quick=args.quick, path=path, timeout_seconds=args.timeout)
    if calibration is not None:
        for line in [*describe(calibration), f"written to {path}"]:
            console.print(line, markup=False, soft_wrap=True)
    return _profile_layers(args, MEASURED) if place == (None, None, None) and args.output is None else 0


def _profile_layers(args: argparse.Namespace, name: str) -> int:
    """Measure what each layer takes on this machine, for emulated compute, and write the profile of that name."""
    from common.compute_profile import profile_path
    from lab.layers import describe_profile, measure_profile, save_profile

    path = profile_path(name, model=args.model)
    if name == "real":
        raise UserError("--profile: 'real' means to compute; give another name")
    profile = measure_profile(Path(name).stem, model=args.model, device=args.device, rounds=2 if args.quick else 5)
    save_profile(profile, path)
    for line in [*describe_profile(profile), f"written to {path}"]:
        console.print(line, markup=False, soft_wrap=True)
    return 0
