"""The page ``report.html``: what the template shows, gathered from results, findings, tables and drawings.

One file without outside resources; every text is escaped by jinja2, and only the figures, which are made here, are not.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lab.plot_style import Drawing
from lab.report import tables
from lab.report.figure_pages import MissingFigure
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
    "command": "command",
    "alpha": "alpha, s a message",
    "beta": "beta, s a byte",
    "gamma": "gamma, s a byte summed",
}
_SHOWN_APART = ("command",)


def render(
    results: Mapping[str, Any],
    drawings: Sequence[tuple[ComparisonGroup, Mapping[str, Drawing | MissingFigure]]],
    timelines: Sequence[Drawing | MissingFigure],
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
    done = sum(cell.get("status") == "done" for cell in cells)
    many = len(drawings) > 1
    return environment.get_template("report.html.jinja").render(
        compare=results.get("kind") != "report",
        created=str(results.get("created") or ""),
        emulated=what_is_emulated(settings) if results.get("emulated") else "",
        finished=bool(results.get("finished")),
        done=done,
        total=len(cells),
        summary=_summary(settings),
        command=settings.get("command"),
        warnings=results.get("warnings") or [],
        differences=results.get("differences") or [],
        sections=[
            _section(block, figures, results, index, many)
            for index, (block, figures) in enumerate(drawings, start=1)
        ],
        many=many,
        weak=settings.get("scaling") == "weak",
        settings=_pairs(settings),
        environment=_pairs(results.get("environment") or {}),
        timelines=[_figure(timeline) for timeline in timelines],
        failed=_failed(cells),
        prediction=_prediction(results),
        warmup=settings.get("warmup"),
        steps=settings.get("steps"),
        repeats=settings.get("repeats"),
    )


def tidy(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(\d\]?) (%|s|MB|nodes?|points|cells)(?=\W|$)", "\\1\u00a0\\2", text)


def _summary(settings: Mapping[str, Any]) -> list[str]:
    """A line of what was run, of what is known."""
    parts = [
        ("model", "{}"),
        ("dataset", "on {}"),
        ("scaling", "{} scaling"),
        ("batch_size", "batch {}"),
        ("steps", "{} steps"),
        ("repeats", "{} repeats"),
    ]
    return [form.format(settings[name]) for name, form in parts if settings.get(name) is not None]


def _section(
    block: ComparisonGroup,
    figures: Mapping[str, Drawing | MissingFigure],
    results: Mapping[str, Any],
    index: int,
    many: bool,
) -> dict[str, Any]:
    found = findings(block, results.get("timelines"))
    topics = dict.fromkeys(finding.topic for finding in found)
    return {
        "id": f"part{index}-" if many else "",
        "label": block.label,
        "topics": [
            (topic, [finding for finding in found if finding.topic == topic]) for topic in topics
        ],
        "tables": [
            _table(block, "Times", tables.TIMES),
            _table(block, "Scaling, bytes, memory", tables.COSTS),
        ],
        "figures": [_figure(figure) for figure in figures.values()],
        "settings": _group_settings(block, results),
        "predicted": _predicted_rows(block),
        "cautions": sum(finding.caution for finding in found),
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


def _figure(figure: Drawing | MissingFigure) -> dict[str, Any]:
    if isinstance(figure, MissingFigure):
        return {"name": figure.name, "title": figure.title, "missing": figure.reason}
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "alt": figure.alt,
        "missing": None,
        "wide": Markup(figure.wide),
        "narrow": Markup(figure.narrow),
    }


def _group_settings(block: ComparisonGroup, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What holds for the cells of this block: rate, batch, seeds and folders, read off the cells themselves."""
    batches = {row.cell.get("batch_size"): None for row in block.rows}
    repeats = [repeat for row in block.rows for repeat in row.cell.get("repeats") or []]
    seeds = {repeat.get("seed"): None for repeat in repeats}
    folders = {str(repeat["folder"]): None for repeat in repeats if repeat.get("folder")}
    pairs = [
        *_pairs((results.get("groups") or {}).get(str(block.group)) or {}),
        ("link rate", rate_text(block.rate)),
        ("global batch size", _text(list(batches))),
        ("seeds", _text(list(seeds))),
    ]
    if results.get("kind") == "report":
        pairs.append(("runs", _text(list(folders))))
    return pairs


def _prediction(results: Mapping[str, Any]) -> dict[str, Any] | None:
    prediction = results.get("prediction")
    if not prediction:
        return None
    return {
        "made": str(prediction.get("made") or ""),
        "created": str(results.get("created") or ""),
        "calibration": _pairs(prediction.get("calibration") or {}),
    }


def _predicted_rows(block: ComparisonGroup) -> list[dict[str, Any]]:
    return [_predicted_row(row) for row in block.rows if row.prediction]


def _predicted_row(row: CellRow) -> dict[str, Any]:
    scale = row.step or row.predicted
    reason = row.prediction.get("why") or "no reason given"
    return {
        "id": row.id,
        "predicted": seconds_text(row.predicted, scale),
        "compute": seconds_text(row.prediction.get("compute_seconds"), scale),
        "sync": seconds_text(row.prediction.get("sync_seconds"), scale),
        "measured": seconds_text(row.step, row.step),
        "far": row.error is not None and abs(row.error) > 0.2,
        "error": NOTHING if row.error is None else percent(row.error, 1, signed=True),
        "scope": "in scope" if row.in_scope else f"out of scope: {reason}",
    }


def _failed(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "id": cell["id"],
            "status": cell["status"],
            "message": str(cell.get("message") or "no message"),
        }
        for cell in cells
        if cell.get("status") == "failed"
        or (cell.get("status") == "partial" and cell.get("message"))
    ]


def _pairs(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            _LABELS.get(name, str(name).replace("_", " ")),
            ", ".join(map(rate_text, value)) if name == "rates" and value else _text(value),
        )
        for name, value in content.items()
        if name not in _SHOWN_APART
    ]


def _text(value: Any) -> str:
    """A setting as a person writes it."""
    if value is None or value == [] or value == "" or value == [None]:
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
