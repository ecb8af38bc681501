"""The report of a comparison: tables, figures, traces and one HTML page, from ``results`` of ``lab compare`` or ``lab report``.

``write_report`` is the one call. Reading order: ``view`` (what may be compared, what follows from a cell), ``losses``,
``findings`` (what it shows, in words, with ``speed_findings``, ``training_findings``, ``prediction_findings``), ``tables``,
``figures``, ``curves``, ``timeline``, ``figure_pages`` (all figures), ``html``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """Write table.md, table.csv, the figures as PNG and SVG, trace-<cell>.json and report.html of ``results`` into ``folder``.

    ``results`` is as lab/compare/results.py documents and has checked it, finished or not: what
    cannot be shown yet is named in its place. Files of an earlier call are replaced. Raises OSError
    where ``folder`` cannot be written.
    """
    import json

    from lab.report import figure_pages, html, tables, timeline, view

    folder.mkdir(parents=True, exist_ok=True)
    blocks = view.blocks(results)
    (folder / "table.md").write_text(tables.markdown(blocks), encoding="utf-8")
    (folder / "table.csv").write_text(tables.csv_text(blocks), encoding="utf-8")
    for key, step in (results.get("timelines") or {}).items():
        text = json.dumps(timeline.trace(step, key), allow_nan=False)
        (folder / f"trace-{view.safe_name(key)}.json").write_text(text, encoding="utf-8")
    drawings = [(block, figure_pages.draw_block(folder, block)) for block in blocks]
    page = html.render(results, drawings, list(figure_pages.draw_timelines(folder, results)))
    (folder / "report.html").write_text(page, encoding="utf-8")
