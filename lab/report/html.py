"""The page ``report.html``: hands findings, tables and drawings to the template.

The page is one file without outside resources: it can be copied alone. The only other file that it
links to is ``companion``, a page in its folder.
jinja2 escapes every text; only the SVG of the figures, which this package draws, stays as it is.
"""

import base64
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from common.utils.grouping import grouped
from lab.comparison.record import Cell, Comparison
from lab.html_page import page_template
from lab.report import tables
from lab.report.drawings.figure_pages import Drawing
from lab.report.findings import REACH, ReportFinding, findings
from lab.report.losses import loss_table
from lab.report.settings_text import block_settings, pairs, summary
from lab.report.verdict import verdict
from lab.report.view import ComparisonGroup, what_is_emulated


@cache
def _template() -> jinja2.Template:
    file = Path(__file__).with_name("report.html.jinja")
    return page_template(file, tidy=tidy, time=lambda text: str(text or "").replace("T", " "))


def render(
    comparison: Comparison,
    drawings: Sequence[tuple[ComparisonGroup, Sequence[Drawing]]],
    timelines: Sequence[Drawing],
    *,
    companion: str | None = None,
) -> str:
    """Return the page with the figures of each block and the timelines.

    companion : name of the page beside it that shows predictions for other clusters.
    """
    blocks = [block for block, _ in drawings]
    many = len(blocks) > 1
    sections = []
    for index, (block, figures) in enumerate(drawings, start=1):
        prefix = f"part{index}-" if many else ""
        sections.append(_section(prefix, block, figures, comparison))
    calibration = comparison.prediction.calibration if comparison.prediction else {}
    return _template().render(
        companion=companion,
        compare=comparison.kind != "report",
        created=comparison.created,
        emulated=comparison.emulated,
        imitated=_imitated(blocks),
        finished=comparison.finished,
        done=sum(cell.status == "done" for cell in comparison.cells),
        total=len(comparison.cells),
        summary=summary(comparison.settings),
        warnings=[] if len(sections) == 1 else comparison.warnings,
        differences=comparison.differences,
        skipped=comparison.skipped,
        sections=sections,
        many=many,
        settings=comparison.settings,
        named_settings=pairs(comparison.settings),
        environment=pairs(comparison.environment),
        timelines=timelines,
        columns=tables.COLUMNS,
        heading=tables.heading,
        foretold=tables.PREDICTION,
        failed=[row for block in blocks for row in block.rows if _has_failed(row.cell)],
        prediction=comparison.prediction,
        first_run=_first_start(blocks),
        calibration=pairs(calibration),
        downloads={
            "table.csv": _data_address("text/csv", tables.csv_text(blocks)),
            "table.md": _data_address("text/markdown", tables.markdown(blocks)),
        },
    )


def _imitated(blocks: Sequence[ComparisonGroup]) -> str:
    """Return what was emulated, each sentence once."""
    texts = [what_is_emulated(block.settings) for block in blocks if block.emulated]
    return " ".join(dict.fromkeys(texts))


def _has_failed(cell: Cell) -> bool:
    """Return whether all runs of a cell failed, or some did and say why."""
    return cell.status == "failed" or (cell.status == "partial" and bool(cell.message))


def _first_start(blocks: Sequence[ComparisonGroup]) -> str:
    """Return when the first run started; "" if this is not known of each of them."""
    runs = [run for block in blocks for row in block.rows for run in row.runs]
    return min((run.started or "" for run in runs), default="")


def tidy(text: str) -> str:
    """Keep a number and its unit on one line."""
    units = r"(\d\]?) (%|s|ms|MB|nodes?|ranks?|points|cells|times)(?=\W|$)"
    return re.sub(units, "\\1\u00a0\\2", text)


def _data_address(kind: str, text: str) -> str:
    """Return an address that holds ``text`` itself, so that the page needs no second file."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _section(
    prefix: str, block: ComparisonGroup, figures: Sequence[Drawing], comparison: Comparison
) -> dict[str, Any]:
    """Return what the page shows of a block.

    id : the beginning of its ids in the page. topics : findings by topic, without ``wrong`` and
    ``limits``. tables : names of columns by title.
    """
    found = findings(block)
    rest = grouped((finding.caution, finding) for finding in found if not finding.wrong)
    limits = rest.get(True, [])
    if not prefix:  # where there are several sections, warnings belong to none of them
        limits = [*(ReportFinding(REACH, warning) for warning in comparison.warnings), *limits]
    lines = tables.lines(block)
    shown: dict[str, Sequence[str]] = {
        "Results": tables.with_values(tables.RESULTS, lines),
        "Times": tables.with_values(tables.TIMES, lines),
        "Scaling, bytes, memory": tables.with_values(tables.COSTS, lines),
    }
    if any(row.memory or row.predicted_memory for row in block.rows):
        shown["Tensors of the rank that holds most"] = tables.MEMORY
    return {
        "id": prefix,
        "block": block,
        "verdict": verdict(block, found),
        "wrong": [finding for finding in found if finding.wrong],
        "topics": grouped((finding.topic, finding) for finding in rest.get(False, [])),
        "limits": limits,
        "tables": shown,
        "lines": lines,
        "losses": loss_table(block),
        "figures": figures,
        "settings": block_settings(block, comparison),
    }
