"""The page ``report.html``: hands results, findings, tables and drawings to the template.

The page is one file without outside resources, and refers to no other file: it can be copied alone.
jinja2 escapes every text; only the SVG of the figures, which this package draws, stays as it is.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from lab.report import tables
from lab.report.drawings.figure_pages import Drawing
from lab.report.drawings.svg import share_styles
from lab.report.equality import wrong_rows
from lab.report.findings import findings
from lab.report.settings_text import block_settings, pairs, summary
from lab.report.verdict import verdict
from lab.report.view import (
    NOTHING,
    CellRow,
    ComparisonGroup,
    percent,
    seconds_text,
    what_is_emulated,
)

# The best of these columns is marked: the smallest, or for the second three the largest.
_SMALLEST: dict[str, Callable[[CellRow], float | None]] = {
    "step": lambda row: row.step,
    "sync": lambda row: row.median("sync"),
    "root": lambda row: row.median("root_bytes_sent"),
    "others": lambda row: row.median("others_bytes_sent"),
    "memory": lambda row: row.median("peak_memory_bytes"),
}
_LARGEST: dict[str, Callable[[CellRow], float | None]] = {
    "speedup": lambda row: row.speedup,
    "efficiency": lambda row: row.efficiency,
    "samples": lambda row: row.samples_per_second,
}


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tidy"] = tidy
    environment.filters["time"] = lambda text: str(text or "").replace("T", " ")
    return environment.get_template("report.html.jinja")


def render(
    results: Mapping[str, Any],
    drawings: Sequence[tuple[ComparisonGroup, Sequence[Drawing]]],
    timelines: Sequence[Drawing],
) -> str:
    """Return the page for ``results`` with the figures of each block and the timelines."""
    settings, cells = results.get("settings") or {}, results.get("cells") or []
    prediction, many = results.get("prediction"), len(drawings) > 1
    warnings, blocks = list(results.get("warnings") or []), [block for block, _ in drawings]
    sections = [
        {"id": f"part{index}-" if many else ""} | _section(block, figures, results)
        for index, (block, figures) in enumerate(drawings, start=1)
    ]
    if len(sections) == 1:  # else they belong to no single section
        sections[0]["limits"] = [*map(_Warning, warnings), *sections[0]["limits"]]
        warnings = []
    page = _template().render(
        compare=results.get("kind") != "report",
        created=results.get("created"),
        emulated=what_is_emulated(settings) if results.get("emulated") else "",
        finished=bool(results.get("finished")),
        done=sum(cell.get("status") == "done" for cell in cells),
        total=len(cells),
        summary=summary(settings),
        warnings=warnings,
        differences=results.get("differences") or [],
        sections=sections,
        many=many,
        settings=settings,
        named_settings=pairs(settings),
        environment=pairs(results.get("environment") or {}),
        timelines=timelines,
        failed=[
            (row.name, row.cell)
            for row in (row for block in blocks for row in block.rows)
            if row.status == "failed" or (row.status == "partial" and row.cell.get("message"))
        ],
        prediction=prediction,
        first_run=_first_start(cells),
        calibration=pairs(prediction.get("calibration") or {}) if prediction else [],
        downloads={
            "table.csv": _data_address("text/csv", tables.csv_text(blocks)),
            "table.md": _data_address("text/markdown", tables.markdown(blocks)),
        },
    )
    return share_styles(page)


class _Warning:
    """A warning of the results, which stands among the limits without evidence."""

    evidence = ""

    def __init__(self, text: str) -> None:
        self.text = text


def _first_start(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """Return when the first run started, or None if a run's start is unknown."""
    repeats = [repeat for cell in cells for repeat in cell.get("repeats") or []]
    starts = [repeat.get("started") for repeat in repeats if repeat.get("status") == "done"]
    known = [start for start in starts if start]
    return min(known) if known and len(known) == len(starts) else None


def tidy(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(\d\]?) (%|s|ms|MB|nodes?|points|cells|times)(?=\W|$)", "\\1\u00a0\\2", text)


def _data_address(kind: str, text: str) -> str:
    """Return an address that holds ``text`` itself, so that the page needs no second file."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _section(
    block: ComparisonGroup, figures: Sequence[Drawing], results: Mapping[str, Any]
) -> dict[str, Any]:
    found = findings(block, results.get("timelines"))
    answer = verdict(block, found)
    shown = [finding for finding in found if not finding.caution and not finding.wrong]
    return {
        "label": block.label,
        "verdict": answer,
        "wrong": [finding for finding in found if finding.wrong],
        "topics": [
            (topic, [finding for finding in shown if finding.topic == topic])
            for topic in dict.fromkeys(finding.topic for finding in shown)
        ],
        "limits": [finding for finding in found if finding.caution and not finding.wrong],
        "tables": [
            _table(block, "Times", tables.TIMES),
            _table(block, "Scaling, bytes, memory", tables.COSTS),
            *(
                [_table(block, "Tensors of the rank that holds most", tables.MEMORY)]
                if any(row.memory() or row.memory(predicted=True) for row in block.rows)
                else []
            ),
        ],
        "figures": figures,
        "settings": block_settings(block, results),
        "predicted": [_predicted_row(row) for row in block.rows if row.prediction],
    }


def _table(block: ComparisonGroup, name: str, keys: Sequence[str]) -> dict[str, Any]:
    columns = [column for key in keys for column in tables.COLUMNS if column.key == key]
    best = {(column.key, row.id) for column in columns for row in best_rows(block, column)}
    wrong = wrong_rows(block)
    return {
        "name": name,
        "headings": [
            (tidy(column.heading.replace(", ", ",\u00a0")), column.number) for column in columns
        ],
        "rows": [
            {
                "status": f"{row.status} wrong" if row.id in wrong else row.status,
                "first": row.nodes != (block.rows[index - 1].nodes if index else None),
                "cells": [
                    (
                        tables.cell_text(column, row, wrong),
                        column.number,
                        (column.key, row.id) in best,
                    )
                    for column in columns
                ],
            }
            for index, row in enumerate(block.rows)
        ],
    }


def best_rows(block: ComparisonGroup, column: tables.Column) -> list[CellRow]:
    """Return the rows with the best value of ``column`` on each number of nodes.

    Rows that print the same text are equally good; where all do, none is best. A strategy that
    computes something else than the others is never the best.
    """
    value = _SMALLEST.get(column.key) or _LARGEST.get(column.key)
    if value is None:
        return []
    best, wrong = [], wrong_rows(block)
    for nodes in block.nodes_beyond_one:
        right = [row for row in block.at(nodes) if row.id not in wrong]
        values = {row.id: number for row in right if (number := value(row)) is not None}
        rows = [row for row in right if row.id in values]
        if len({column.text(row) for row in rows}) < 2:
            continue
        pick = min if column.key in _SMALLEST else max
        top = column.text(pick(rows, key=lambda row: values[row.id]))
        best += [row for row in rows if column.text(row) == top]
    return best


def _predicted_row(row: CellRow) -> dict[str, Any]:
    scale = row.step or row.predicted
    return {
        "name": row.name,
        "predicted": seconds_text(row.predicted, scale),
        "compute": seconds_text(row.prediction.get("compute_seconds"), scale),
        "sync": seconds_text(row.prediction.get("sync_seconds"), scale),
        "measured": seconds_text(row.step, row.step),
        "far": row.error is not None and abs(row.error) > 0.2,
        "error": NOTHING if row.error is None else percent(row.error, 1, signed=True),
        "scope": "in scope"
        if row.in_scope
        else f"out of scope: {row.prediction.get('why') or 'no reason given'}",
    }
