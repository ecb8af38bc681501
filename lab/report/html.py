"""The page ``report.html``: hands results, findings, tables and drawings to the template.

The page is one file without outside resources. jinja2 escapes every text; only the SVG of the
figures, which this package draws, stays as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lab.report import tables
from lab.report.figure_pages import Drawing
from lab.report.findings import findings
from lab.report.view import (
    NOTHING,
    CellRow,
    ComparisonGroup,
    percent,
    rate_text,
    seconds_text,
    what_is_emulated,
)

_LABELS = {
    "dataset": "data",
    "model": "model",
    "scaling": "scaling",
    "batch_size": "batch size",
    "steps": "measured steps",
    "warmup": "warm-up steps, left out",
    "repeats": "repeats of each cell",
    "seeds": "seeds",
    "nodes": "numbers of nodes",
    "sync": "strategies",
    "rates": "link rates",
    "until_accuracy": "until accuracy",
    "alpha": "alpha, s a message",
    "beta": "beta, s a byte",
    "gamma": "gamma, s a byte summed",
}
_SUMMARY = {
    "model": "{}",
    "dataset": "on {}",
    "scaling": "{} scaling",
    "batch_size": "batch {}",
    "steps": "{} steps",
    "repeats": "{} repeats",
}


def render(
    results: Mapping[str, Any],
    drawings: Sequence[tuple[ComparisonGroup, Sequence[Drawing]]],
    timelines: Sequence[Drawing],
) -> str:
    """Return the page for ``results`` with the figures of each block and the timelines."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tidy"] = tidy
    settings, cells = results.get("settings") or {}, results.get("cells") or []
    prediction, many = results.get("prediction"), len(drawings) > 1
    return environment.get_template("report.html.jinja").render(
        compare=results.get("kind") != "report",
        created=str(results.get("created") or ""),
        emulated=what_is_emulated(settings) if results.get("emulated") else "",
        finished=bool(results.get("finished")),
        done=sum(cell.get("status") == "done" for cell in cells),
        total=len(cells),
        summary=[
            text.format(settings[name])
            for name, text in _SUMMARY.items()
            if settings.get(name) is not None
        ],
        warnings=results.get("warnings") or [],
        differences=results.get("differences") or [],
        sections=[
            {"id": f"part{index}-" if many else ""} | _section(block, figures, results)
            for index, (block, figures) in enumerate(drawings, start=1)
        ],
        many=many,
        settings=settings,
        named_settings=_pairs(settings),
        environment=_pairs(results.get("environment") or {}),
        timelines=timelines,
        failed=[
            cell
            for cell in cells
            if cell.get("status") == "failed"
            or (cell.get("status") == "partial" and cell.get("message"))
        ],
        made=str(prediction.get("made") or "") if prediction else None,
        calibration=_pairs(prediction.get("calibration") or {}) if prediction else [],
    )


def tidy(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(\d\]?) (%|s|MB|nodes?|points|cells)(?=\W|$)", "\\1\u00a0\\2", text)


def _section(
    block: ComparisonGroup, figures: Sequence[Drawing], results: Mapping[str, Any]
) -> dict[str, Any]:
    found = findings(block, results.get("timelines"))
    return {
        "label": block.label,
        "topics": [
            (topic, [finding for finding in found if finding.topic == topic])
            for topic in dict.fromkeys(finding.topic for finding in found)
        ],
        "tables": [
            _table(block, "Times", tables.TIMES),
            _table(block, "Scaling, bytes, memory", tables.COSTS),
        ],
        "figures": figures,
        "settings": _block_settings(block, results),
        "predicted": [_predicted_row(row) for row in block.rows if row.prediction],
    }


def _table(block: ComparisonGroup, name: str, keys: Sequence[str]) -> dict[str, Any]:
    columns = [column for key in keys for column in tables.COLUMNS if column.key == key]
    return {
        "name": name,
        "columns": columns,
        "rows": [
            {
                "status": row.status,
                "first": row.nodes != (block.rows[index - 1].nodes if index else None),
                "cells": [(column.text(row), column.number) for column in columns],
            }
            for index, row in enumerate(block.rows)
        ],
    }


def _block_settings(block: ComparisonGroup, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the block's own settings, rate, batch sizes, seeds and folders."""
    repeats = [repeat for row in block.rows for repeat in row.cell.get("repeats") or []]
    folders = [str(repeat["folder"]) for repeat in repeats if repeat.get("folder")]
    return [
        *_pairs((results.get("groups") or {}).get(str(block.group)) or {}),
        ("link rate", rate_text(block.rate)),
        ("global batch size", _distinct(row.cell.get("batch_size") for row in block.rows)),
        ("seeds", _distinct(repeat.get("seed") for repeat in repeats)),
        *([("runs", _distinct(folders))] if results.get("kind") == "report" else []),
    ]


def _predicted_row(row: CellRow) -> dict[str, Any]:
    scale = row.step or row.predicted
    return {
        "id": row.id,
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


def _pairs(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text; the page shows the command elsewhere."""
    return [
        (
            _LABELS.get(name, str(name).replace("_", " ")),
            ", ".join(map(rate_text, value)) if name == "rates" and value else _text(value),
        )
        for name, value in content.items()
        if name != "command"
    ]


def _distinct(values: Iterable[Any]) -> str:
    return _text(list(dict.fromkeys(values)))


def _text(value: Any) -> str:
    """Return a setting as a person writes it."""
    if value in (None, [], "", [None]):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "; ".join(
            f"{name.replace('_', ' ')} {_text(entry)}" for name, entry in value.items()
        )
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
