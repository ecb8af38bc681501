"""The report of a comparison: tables, figures, traces and one HTML page.

``add_recomputed`` settles doubts, ``write_report`` writes the files, ``terminal.print_answer``
prints the answer. Reading order: ``view`` (the cells and what follows from them), ``losses``,
``equality`` (do the strategies compute the same), ``one_process`` (which one is wrong),
``findings`` (all sentences), ``verdict`` (the answer), ``tables``, ``drawings`` (all figures),
``html`` (with ``settings_text``).
"""

from pathlib import Path
from typing import Any


def add_recomputed(results: dict[str, Any], folder: Path) -> bool:
    """Compute the first steps of runs again where their losses leave a doubt who is right.

    Adds ``one_process`` to the repeats, and returns whether there was such a run. ``folder`` : the
    comparison's; it has those of the runs.
    """
    from lab.report.equality import check
    from lab.report.view import blocks

    cells, doubtful = {cell["id"]: cell for cell in results["cells"]}, []
    for block in blocks(results):
        for nodes in () if block.emulated_compute else block.nodes_beyond_one:
            found, exact = check(block, nodes), [row for row in block.at(nodes) if row.exact]
            rows = exact if found.doubtful else [row for row in exact if row.sync in found.untested]
            doubtful += [run for row in rows for run in cells[row.id]["repeats"]]
    to_do = [run for run in doubtful if run["status"] == "done" and "one_process" not in run]
    for run in to_do:
        from lab.report.one_process import recompute  # imports torch

        run["one_process"] = recompute(folder / run["folder"], run)
    return bool(to_do)


def write_report(folder: Path, results: dict[str, Any]) -> None:
    """Write the report of ``results`` into ``folder`` and replace the files of an earlier report.

    Writes table.md, table.csv, each figure as PNG and SVG, trace-<cell>.json and report.html.
    ``results`` has the format of lab/compare/results.py and may be unfinished: the report says
    what it cannot show yet. Raises OSError if it cannot write.
    """
    import json

    from lab.report import html, tables, view
    from lab.report.drawings import figure_pages, timeline

    folder.mkdir(parents=True, exist_ok=True)
    blocks = view.blocks(results)
    (folder / "table.md").write_text(tables.markdown(blocks), encoding="utf-8")
    (folder / "table.csv").write_text(tables.csv_text(blocks), encoding="utf-8")
    for key, step in results["timelines"].items():
        (folder / f"trace-{key}.json").write_text(
            json.dumps(timeline.trace(step, key), allow_nan=False), encoding="utf-8"
        )
    drawings = [(block, list(figure_pages.draw_block(folder, block))) for block in blocks]
    page = html.render(results, drawings, list(figure_pages.draw_timelines(folder, results)))
    (folder / "report.html").write_text(page, encoding="utf-8")
