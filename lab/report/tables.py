"""The table of cells: ``table.md`` to paste, ``table.csv`` to compute with, columns of the page.

Texts are rounded. The CSV holds the exact numbers, in seconds, bytes and ratios.
"""

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.profiling.records import KINDS
from lab.report.equality import wrong_rows
from lab.report.view import (
    NOTHING,
    CellRow,
    ComparisonGroup,
    interval_text,
    percent,
    rate_text,
    seconds_text,
    what_is_emulated,
)

WRONG = "yes: WRONG"  # claims to be exact, but computes something else
_MARKDOWN_ESCAPES = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        "\\": "\\\\",
        "|": "\\|",
        "`": "\\`",
        "*": "\\*",
    }
)


@dataclass(frozen=True)
class Column:
    """A column of the readable table: its heading with the unit, and the text of a row."""

    key: str
    heading: str
    text: Callable[[CellRow], str]
    number: bool = True


def seconds(row: CellRow, name: str) -> str:
    """Return a median in seconds, with as many decimals as the step's."""
    return seconds_text(row.median(name), row.step)


def _or_nothing(value: float | None, form: str, *, divide: float = 1.0) -> str:
    return NOTHING if value is None else format(value / divide, form)


def claim(row: CellRow) -> str:
    """Return whether the strategy claims to give every rank the exact mean gradient."""
    if row.nodes == 1:
        return NOTHING
    return "yes" if row.exact else "no"


def step_text(row: CellRow) -> str:
    """Return the median step with its interval."""
    return seconds(row, "step") + interval_text(row)


def speedup_text(row: CellRow) -> str:
    return _or_nothing(row.speedup, ".2f")


def _status(row: CellRow) -> str:
    message = " ".join(str(row.cell.get("message") or "").split())
    shown = message if len(message) <= 80 else f"{message[:79]}…"
    return f"{row.status}: {shown}" if shown else row.status


def _kind_of_memory(row: CellRow, kind: str) -> str:
    # Emulated compute updates nothing, so it has no optimiser state to measure.
    return _or_nothing((row.memory() or row.memory(predicted=True)).get(kind), ".2f", divide=1e6)


def _megabytes(memory: Mapping[str, int]) -> str:
    return f"{sum(memory.values()) / 1e6:.2f}" if memory else NOTHING


COLUMNS = (
    Column("strategy", "strategy", lambda row: row.sync, number=False),
    Column("nodes", "nodes", lambda row: str(row.nodes)),
    Column("exact", "claims exact", claim, number=False),
    Column("step", "step, s [95 %]", step_text),
    *(
        Column(name, f"{name}, s", partial(seconds, name=name))
        for name in ("data", "forward", "backward")
    ),
    Column("sync", "exposed comm. (sync), s", partial(seconds, name="sync")),
    Column("wait", "waiting, s", partial(seconds, name="wait")),
    Column("update", "update, s", partial(seconds, name="update")),
    Column("speedup", "speed-up", speedup_text),
    Column(
        "efficiency",
        "efficiency",
        lambda row: NOTHING if row.efficiency is None else percent(row.efficiency, 1),
    ),
    Column("samples", "samples/s", lambda row: _or_nothing(row.samples_per_second, ".0f")),
    Column(
        "root",
        "rank 0 sent, MB",
        lambda row: _or_nothing(row.median("root_bytes_sent"), ".2f", divide=1e6),
    ),
    Column(
        "others",
        "other ranks sent, MB",
        lambda row: (
            NOTHING
            if row.nodes == 1
            else _or_nothing(row.median("others_bytes_sent"), ".2f", divide=1e6)
        ),
    ),
    Column(
        "memory",
        "peak memory, MB",
        lambda row: _or_nothing(row.median("peak_memory_bytes"), ".0f", divide=1e6),
    ),
    *(
        Column(kind, f"{name}, MB", partial(_kind_of_memory, kind=kind))
        for kind, name in KINDS.items()
    ),
    Column("tensors", "all tensors, MB", lambda row: _megabytes(row.memory())),
    Column(
        "tensors_predicted", "predicted, MB", lambda row: _megabytes(row.memory(predicted=True))
    ),
    Column(
        "predicted",
        "predicted step, s",
        lambda row: seconds_text(row.predicted, row.step or row.predicted),
    ),
    Column(
        "error",
        "error",
        lambda row: NOTHING if row.error is None else percent(row.error, 1, signed=True),
    ),
    Column("status", "status", _status, number=False),
)
TIMES = (
    "strategy",
    "nodes",
    "exact",
    "step",
    "data",
    "forward",
    "backward",
    "sync",
    "wait",
    "update",
    "status",
)
COSTS = (
    "strategy",
    "nodes",
    "speedup",
    "efficiency",
    "samples",
    "root",
    "others",
    "memory",
    "predicted",
    "error",
)
MEMORY = ("strategy", "nodes", *KINDS, "tensors", "tensors_predicted")
_NOT_IN_MARKDOWN = {*KINDS, "tensors_predicted"} - {"optimizer_state"}


def cell_text(column: Column, row: CellRow, wrong: Collection[str]) -> str:
    """Return the text of a cell; ``wrong`` has the ids of the rows with a wrong result."""
    return WRONG if column.key == "exact" and row.id in wrong else column.text(row)


def markdown(blocks: Sequence[ComparisonGroup]) -> str:
    """Return the tables of all blocks as Markdown, with headings if there are several."""
    parts = []
    columns = [column for column in COLUMNS if column.key not in _NOT_IN_MARKDOWN]
    for block in blocks:
        wrong = wrong_rows(block)
        lines = [
            [column.heading for column in columns],
            ["---:" if column.number else "---" for column in columns],
            *([cell_text(column, row, wrong) for column in columns] for row in block.rows),
        ]
        heading = f"**{escape(block.label)}**\n\n" if len(blocks) > 1 else ""
        emulated = f"{escape(what_is_emulated(block.settings))}\n\n" if block.emulated else ""
        parts.append(
            heading
            + emulated
            + "\n".join("| " + " | ".join(map(escape, line)) + " |" for line in lines)
            + "\n"
        )
    return "\n".join(parts) or "No cells.\n"


def escape(text: str) -> str:
    """Return ``text`` for a cell of a Markdown table: one line, without markup."""
    return " ".join(text.translate(_MARKDOWN_ESCAPES).split())


def csv_text(blocks: Sequence[ComparisonGroup]) -> str:
    """Return all rows as CSV with a header row of names with units; None becomes an empty field."""
    rows = [_csv_row(block, row) for block in blocks for row in block.rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, rows[0] if rows else ["strategy", "nodes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _csv_row(block: ComparisonGroup, row: CellRow) -> dict[str, Any]:
    low, high = row.interval("step") or (None, None)
    return {
        "strategy": row.sync,
        "nodes": row.nodes,
        "group": block.group,
        "rate": rate_text(row.cell.get("rate")),
        "exact": int(row.exact),
        "emulated": int(block.emulated),
        "status": row.status,
        "repeats": len(row.repeats),
        "global_batch_size_samples": row.cell.get("batch_size"),
        "step_seconds": row.step,
        "step_seconds_low95": low,
        "step_seconds_high95": high,
        **{
            f"{name}_seconds": row.median(name)
            for name in ("data", "forward", "backward", "sync", "wait", "wire", "update")
        },
        "speedup_ratio": row.speedup,
        "efficiency_ratio": row.efficiency,
        "samples_per_second": row.samples_per_second,
        "root_sent_bytes": row.median("root_bytes_sent"),
        "others_sent_bytes": row.median("others_bytes_sent"),
        "peak_memory_bytes": row.median("peak_memory_bytes"),
        **{f"{kind}_bytes": row.memory().get(kind) for kind in KINDS},
        "predicted_tensor_bytes": sum(row.memory(predicted=True).values()) or None,
        "predicted_step_seconds": row.predicted,
        "prediction_error_ratio": row.error,
        "prediction_in_scope": int(row.in_scope) if row.prediction else None,
    }
