"""The report of a comparison: tables, figures, traces and one HTML page.

``write_report`` writes the files, ``terminal.print_answer`` prints the answer; both are functions
of the comparison's record alone. Reading order: ``claims`` (did a cell's ranks get the mean),
``timeline`` (a recorded step), ``view`` (the cells and what follows from them), ``losses``,
``causes`` (what makes a difference), ``findings`` (all sentences), ``verdict`` (the answer),
``tables``, ``drawings`` (all figures), ``html`` (with ``settings_text``) and ``latex``.
"""

import json
from pathlib import Path

from common.utils.atomic_files import write_atomically
from lab.comparison.record import Comparison
from lab.report.view import blocks


def write_report(
    folder: Path, comparison: Comparison, *, companion: str | None = None, latex: bool = False
) -> None:
    """Write the report of ``comparison`` into ``folder``, and replace an earlier report's files.

    Writes table.md, table.csv, each figure as PNG and SVG, trace-<cell>.json and report.html.
    ``comparison`` may be unfinished: the report says what it cannot show yet. companion : a page in
    the folder to which report.html links. latex : also write report.tex, which shows the PNG files.
    Each file is written whole or not at all. Raises UserError if it cannot be written.
    """
    from lab.report import html, tables, timeline
    from lab.report import latex as latex_form
    from lab.report.drawings import figure_pages

    folder.mkdir(parents=True, exist_ok=True)
    groups = blocks(comparison)
    write_atomically(folder / "table.md", tables.markdown(groups).encode())
    write_atomically(folder / "table.csv", tables.csv_text(groups).encode())
    for cell, step in comparison.timelines.items():
        trace = json.dumps(timeline.trace(step, cell), allow_nan=False)
        write_atomically(folder / f"trace-{cell}.json", trace.encode())
    drawings = [(block, list(figure_pages.draw_block(folder, block))) for block in groups]
    timelines = list(figure_pages.draw_timelines(folder, groups, comparison.timelines))
    page = html.render(comparison, drawings, timelines, companion=companion)
    write_atomically(folder / "report.html", page.encode())
    if latex:
        document = latex_form.document(drawings, comparison.skipped)
        write_atomically(folder / "report.tex", document.encode())
