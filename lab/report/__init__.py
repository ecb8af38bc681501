"""The report of a comparison: tables, figures, traces and one HTML page.

``add_recomputed`` settles doubts, ``write_report`` writes the files, ``terminal.print_answer``
prints the answer. Reading order: ``view`` (the cells and what follows from them), ``losses``,
``equality`` (do the strategies compute the same), ``one_process`` (which one is wrong), ``causes``
(what makes a difference), ``findings`` (all sentences), ``verdict`` (the answer), ``tables``,
``drawings`` (all figures), ``html`` (with ``settings_text``) and ``latex``.
"""

import json
from pathlib import Path

from lab.comparison.record import Comparison, Repeat
from lab.report.view import ComparisonGroup, blocks


def add_recomputed(comparison: Comparison, folder: Path) -> bool:
    """Compute the first steps of runs again where their losses leave a doubt who is right.

    Adds ``one_process`` to the repeats, and returns whether there was such a run. ``folder`` : the
    comparison's; it has those of the runs.
    """
    doubtful = [run for block in blocks(comparison) for run in _doubtful_runs(block)]
    to_do = [run for run in doubtful if run.one_process is None]
    for run in to_do:
        from lab.report.one_process import recompute  # imports torch

        run.one_process = recompute(folder / run.folder, run)
    return bool(to_do)


def _doubtful_runs(block: ComparisonGroup) -> list[Repeat]:
    """Return the runs of strategies that claim to be exact, where the losses do not decide it."""
    from lab.report.equality import check

    if block.emulated_compute:
        return []
    runs = []
    for nodes in block.nodes_beyond_one:
        found = check(block, nodes)
        for row in block.at(nodes):
            if row.exact and (found.doubtful or row.sync in found.untested):
                runs += row.runs
    return runs


def write_report(folder: Path, comparison: Comparison, *, companion: str | None = None) -> None:
    """Write the report of ``comparison`` into ``folder``, and replace an earlier report's files.

    Writes table.md, table.csv, each figure as PNG and SVG, trace-<cell>.json and report.html.
    ``comparison`` may be unfinished: the report says what it cannot show yet. companion : a page in
    the folder to which report.html links. Raises OSError if it cannot write.
    """
    from lab.report import html, tables
    from lab.report.drawings import figure_pages, timeline

    folder.mkdir(parents=True, exist_ok=True)
    groups = blocks(comparison)
    (folder / "table.md").write_text(tables.markdown(groups), encoding="utf-8")
    (folder / "table.csv").write_text(tables.csv_text(groups), encoding="utf-8")
    for cell, step in comparison.timelines.items():
        trace = json.dumps(timeline.trace(step, cell), allow_nan=False)
        (folder / f"trace-{cell}.json").write_text(trace, encoding="utf-8")
    drawings = [(block, list(figure_pages.draw_block(folder, block))) for block in groups]
    timelines = list(figure_pages.draw_timelines(folder, comparison))
    page = html.render(comparison, drawings, timelines, companion=companion)
    (folder / "report.html").write_text(page, encoding="utf-8")


def write_latex(folder: Path, comparison: Comparison) -> Path:
    """Write ``report.tex`` beside the figures of ``write_report``, and return its path."""
    from lab.report.latex import document

    path = folder / "report.tex"
    path.write_text(document(comparison, folder), encoding="utf-8")
    return path
