"""The page ``report.html``: hands results, findings, tables and drawings to the template.

The page is one file without outside resources, and refers to no other file: it can be copied alone.
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
from lab.report import tables
from lab.report.drawings.figure_pages import Drawing
from lab.report.findings import REACH, ReportFinding, findings
from lab.report.settings_text import block_settings, pairs, summary
from lab.report.verdict import verdict
from lab.report.view import ComparisonGroup, Json, what_is_emulated


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"tidy": tidy, "time": lambda text: str(text or "").replace("T", " ")}
    return environment.get_template("report.html.jinja")


def render(
    results: Json,
    drawings: Sequence[tuple[ComparisonGroup, Sequence[Drawing]]],
    timelines: Sequence[Drawing],
) -> str:
    """Return the page for ``results`` with the figures of each block and the timelines."""
    settings, cells, prediction = results["settings"], results["cells"], results.get("prediction")
    warnings, blocks = results["warnings"], [block for block, _ in drawings]
    many = len(blocks) > 1
    sections = [
        {"id": f"part{index}-" if many else ""} | _section(block, figures, results)
        for index, (block, figures) in enumerate(drawings, start=1)
    ]
    if len(sections) == 1:  # else they belong to no single section
        sections[0]["limits"][:0] = [ReportFinding(REACH, warning) for warning in warnings]
        warnings = []
    return _template().render(
        compare=results["kind"] != "report",
        created=results["created"],
        emulated=what_is_emulated(settings) if results.get("emulated") else "",
        finished=results["finished"],
        done=sum(cell["status"] == "done" for cell in cells),
        total=len(cells),
        summary=summary(settings),
        warnings=warnings,
        differences=results.get("differences", []),
        sections=sections,
        many=many,
        settings=settings,
        named_settings=pairs(settings),
        environment=pairs(results["environment"]),
        timelines=timelines,
        columns=tables.COLUMNS,
        foretold=tables.PREDICTION,
        failed=[
            row
            for block in blocks
            for row in block.rows
            if row.status == "failed" or (row.status == "partial" and row.message)
        ],
        prediction=prediction,
        first_run=min(
            (
                run.get("started") or ""
                for block in blocks
                for row in block.rows
                for run in row.runs
            ),
            default="",
        ),
        calibration=pairs((prediction or {}).get("calibration", {})),
        downloads={
            "table.csv": _data_address("text/csv", tables.csv_text(blocks)),
            "table.md": _data_address("text/markdown", tables.markdown(blocks)),
        },
    )


def tidy(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(\d\]?) (%|s|ms|MB|nodes?|points|cells|times)(?=\W|$)", "\\1\u00a0\\2", text)


def _data_address(kind: str, text: str) -> str:
    """Return an address that holds ``text`` itself, so that the page needs no second file."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _section(block: ComparisonGroup, figures: Sequence[Drawing], results: Json) -> dict[str, Any]:
    found = findings(block)
    names: dict[str, Sequence[str]] = {
        "Times": tables.TIMES,
        "Scaling, bytes, memory": tables.COSTS,
    }
    if any(row.memory() or row.memory("predicted_memory") for row in block.rows):
        names["Tensors of the rank that holds most"] = tables.MEMORY
    lines = tables.lines(block)
    return {
        "label": block.label,
        "verdict": verdict(block, found),
        "wrong": [one for one in found if one.wrong],
        "topics": grouped(
            (one.topic, one) for one in found if not one.caution and not one.wrong
        ).items(),
        "limits": [one for one in found if one.caution],
        "tables": names,
        "lines": lines,
        "predicted": [line for line in lines if line.row.prediction],
        "figures": figures,
        "settings": block_settings(block, results),
    }
