"""Run ``lab compare``, ``lab compare --plan`` and ``lab report``, and print what they found."""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import UNSET

from common.errors import INTERRUPTED
from common.reporting.run_lock import lock_folder
from common.utils.atomic_files import refuse_links
from common.utils.paths import new_folder
from common.utils.progress import console
from common.utils.typed_json import calm
from lab.compare.cells import in_turns
from lab.compare.executors import Executors
from lab.compare.imported_runs import collect
from lab.compare.jobs import describe_plan, merge_results, plan_comparison
from lab.compare.prediction import predict_imported
from lab.compare.runner import open_comparison, prepare, run_comparison
from lab.compare.settings import Settings
from lab.comparison.record import Comparison, read_comparison, write_comparison
from lab.report import write_report
from lab.report.terminal import print_answer

# Writes a page beside the report, about its comparison, and returns the file's name; None: it wrote
# none.
Companion = Callable[[Path, Comparison], str | None]


def compare_and_report(
    settings: Settings,
    *,
    reports: Path,
    anew: bool,
    predicts: bool,
    command: str,
    companion: Companion | None = None,
) -> int:
    """Predict, run the comparison, write its report and return the exit status: 1 if a cell failed.

    companion : writes a page that the report links to.

    After Ctrl-C the report shows what is finished.
    """
    executors = Executors(
        max(settings.nodes), settings.rates, ranks_per_node=settings.ranks_per_node
    )
    folder, comparison = open_comparison(settings, reports=reports, anew=anew, command=command)
    status = 0
    try:
        with lock_folder(folder, advice="start another comparison with --new"), executors:
            prepare(settings, folder, comparison, executors, predicts=predicts)
            runs = in_turns(folder, settings, comparison.cells)
            run_comparison(comparison, runs, executors)
    except KeyboardInterrupt:
        status = INTERRUPTED
        console.print(
            "interrupted: all processes have ended, and finished runs are kept. The same command "
            f"continues {folder}",
        )
    failed = [cell.id for cell in comparison.cells if cell.message is not None]
    if failed:
        console.print(f"failed: {', '.join(failed)}. The same command runs them again.")
    _write_and_print(folder, comparison, companion=companion)
    if status == 0 and failed:
        status = 1
    return status


def plan_and_describe(
    settings: Settings, *, reports: Path, anew: bool, predicts: bool, command: str
) -> int:
    """Plan a comparison, or find its unfinished plan, and print how to start the runs."""
    folder, comparison = plan_comparison(
        settings, reports=reports.resolve(), anew=anew, command=command, predicts=predicts
    )
    for line in describe_plan(folder, merge_results(folder, comparison)):
        console.print(line, markup=False)
    return 0


def report_on(
    runs: Sequence[Path],
    *,
    reports: Path,
    scaling: str,
    form: str = "html",
    companion: Companion | None = None,
) -> int:
    """Report on runs that were started by hand, or again on one comparison, in its own folder.

    form : "latex" also writes report.tex. companion : writes a page that the report links to.
    """
    [folder, *others] = runs
    if others or not (folder / "results.json").exists():
        comparison = collect(runs, scaling=scaling)
        predict_imported(comparison)
        folder = new_folder(reports, "report")
        write_comparison(folder / "results.json", comparison)
    else:
        refuse_links(folder, folder.iterdir())  # the report replaces files in it
        comparison = read_comparison(folder / "results.json")
    if comparison.plan is not UNSET:
        for warning in merge_results(folder, comparison).warnings:
            console.print(warning, markup=False)
    for reason in comparison.skipped:
        console.print(calm(f"skipped: {reason}"), markup=False)  # it may quote a file
    for difference in comparison.differences:
        console.print(f"not comparable: {difference}", markup=False)
    _write_and_print(folder, comparison, latex=form == "latex", companion=companion)
    return 0


def _write_and_print(
    folder: Path,
    comparison: Comparison,
    *,
    latex: bool = False,
    companion: Companion | None,
) -> None:
    """Write the report and print its answer."""
    beside = None if companion is None else companion(folder, comparison)
    write_report(folder, comparison, companion=beside, latex=latex)
    print_answer(console, comparison)
    console.print(f"\nreport: {folder / 'report.html'}", markup=False)
    if latex:
        console.print(f"LaTeX: {folder / 'report.tex'}", markup=False)
