"""The table of cells: ``table.md`` to paste, ``table.csv`` to compute with, tables to look at.

``lines(block)`` has every value and its text; Markdown, CSV, page and terminal choose from them.
Texts are rounded. The CSV holds the exact numbers, in seconds, bytes and ratios.
"""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.sync.memory_cost import KINDS
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
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {mark: f"\\{mark}" for mark in "\\|`*"}
)


class Column(NamedTuple):
    """A readable column: its heading with the unit, the format of a number, what is best."""

    heading: str
    form: str = ""  # empty: the value is a text
    best: Callable[..., Any] | None = None  # min or max, marked on the page


class Line(NamedTuple):
    """A row of every table: exact ``values`` by the CSV's names, ``texts`` by ``COLUMNS``."""

    row: CellRow
    values: dict[str, Any]
    texts: dict[str, str]
    wrong: bool
    best: set[str]  # the columns of which the row has the best value on its number of nodes


# By name of the value, which ends with its unit: seconds have the decimals of the step, bytes are
# written in MB.
COLUMNS = {
    "cell": Column("cell"),
    "strategy": Column("strategy"),
    "nodes": Column("nodes", "d"),
    "claim": Column("claims exact"),
    "step_or_status": Column("step, s [95 %]"),
    "exposed_share": Column("exposed comm., s"),
    "step_seconds": Column("step, s [95 %]", "s", min),
    "data_seconds": Column("data, s", "s"),
    "forward_seconds": Column("forward, s", "s"),
    "backward_seconds": Column("backward, s", "s"),
    "sync_seconds": Column("exposed comm. (sync), s", "s", min),
    "wait_seconds": Column("waiting, s", "s"),
    "update_seconds": Column("update, s", "s"),
    "mean_iteration_seconds": Column("mean iteration without the first, s", "s"),
    "speedup_ratio": Column("speed-up", ".2f", max),
    "efficiency_ratio": Column("efficiency", ".1%", max),
    "samples_per_second": Column("samples/s", ".0f", max),
    "root_sent_bytes": Column("rank 0 sent, MB", ".2f", min),
    "others_sent_bytes": Column("other ranks sent, MB", ".2f", min),
    "peak_memory_bytes": Column("peak memory, MB", ".0f", min),
    "largest_peak_memory_bytes": Column("largest rank's, MB", ".0f"),
    **{f"{kind}_bytes": Column(f"{name}, MB", ".2f") for kind, name in KINDS.items()},
    "tensor_bytes": Column("all tensors, MB", ".2f"),
    "predicted_tensor_bytes": Column("predicted, MB", ".2f"),
    "predicted_compute_seconds": Column("compute, s", "s"),
    "predicted_sync_seconds": Column("sync, s", "s"),
    "predicted_step_seconds": Column("predicted step, s", "s"),
    "measured_seconds": Column("measured, s", "s"),
    "prediction_error_ratio": Column("error", "+.1%"),
    "error": Column("error", "+.1%"),
    "scope": Column("scope"),
    "state": Column("status"),
}
_COSTS = (
    *("mean_iteration_seconds", "speedup_ratio", "efficiency_ratio", "samples_per_second"),
    *("root_sent_bytes", "others_sent_bytes", "peak_memory_bytes"),
)
_FORETOLD = ("predicted_step_seconds", "prediction_error_ratio")
_TIMES = (
    *("strategy", "nodes", "claim", "step_seconds", "data_seconds", "forward_seconds"),
    *("backward_seconds", "sync_seconds", "wait_seconds", "update_seconds"),
)
TIMES = (*_TIMES, "state")
COSTS = ("strategy", "nodes", *_COSTS, "largest_peak_memory_bytes", *_FORETOLD)
MEMORY = (
    *("strategy", "nodes", *(f"{kind}_bytes" for kind in KINDS)),
    *("tensor_bytes", "predicted_tensor_bytes"),
)
PREDICTION = (
    *("cell", "predicted_compute_seconds", "predicted_sync_seconds", "predicted_step_seconds"),
    *("measured_seconds", "error", "scope"),
)
MARKDOWN = (*_TIMES, *_COSTS, "optimizer_state_bytes", "tensor_bytes", *_FORETOLD, "state")


def lines(block: ComparisonGroup) -> list[Line]:
    """Return the rows of a block's tables."""
    wrong, found = wrong_rows(block), []
    for row in block.rows:
        values, is_wrong = _values(block, row), row in wrong
        shown = values | _readable(row, is_wrong)
        texts = {name: _text(row, name, shown[name]) for name in COLUMNS}
        found.append(Line(row, values, texts, is_wrong, set()))
    for nodes in block.nodes_beyond_one:
        right = [line for line in found if line.row.nodes == nodes and not line.wrong]
        for name, column in COLUMNS.items():
            known = [line for line in right if line.values.get(name) is not None]
            # lines with the same text are equally good; where all have it, none is best
            if column.best and len({line.texts[name] for line in known}) > 1:
                best = column.best(known, key=lambda line: line.values[name]).texts[name]
                for line in known:
                    line.best.update({name} if line.texts[name] == best else ())
    return found


def _values(block: ComparisonGroup, row: CellRow) -> dict[str, Any]:
    low, high = row.interval("step") or (None, None)
    in_scope = row.prediction.get("in_scope", False)
    return {
        "strategy": row.sync,
        "nodes": row.nodes,
        "group": block.group,
        "rate": rate_text(row.rate),
        "exact": int(row.exact),
        "emulated": int(block.emulated),
        "status": row.status,
        "repeats": len(row.runs),
        "global_batch_size_samples": row.batch_size,
        "step_seconds": row.step or None,
        "step_seconds_low95": low,
        "step_seconds_high95": high,
        **{
            f"{name}_seconds": row.median(name)
            for name in ("data", "forward", "backward", "sync", "wait", "wire", "update")
        },
        "mean_iteration_seconds": row.mean_iteration,
        "speedup_ratio": row.speedup,
        "efficiency_ratio": row.efficiency,
        "samples_per_second": row.batch_size / row.step if row.batch_size and row.step else None,
        "root_sent_bytes": row.median("root_bytes_sent"),
        "others_sent_bytes": row.median("others_bytes_sent"),
        "peak_memory_bytes": row.median("peak_memory_bytes"),
        "largest_peak_memory_bytes": max(row.per_rank("peak_memory_bytes"), default=None),
        **{f"{kind}_bytes": row.memory().get(kind) for kind in KINDS},
        "predicted_tensor_bytes": sum(row.memory("predicted_memory").values()) or None,
        "predicted_step_seconds": row.prediction.get("step_seconds"),
        "prediction_error_ratio": row.error,
        "prediction_in_scope": int(in_scope) if row.prediction else None,
    }


def _readable(row: CellRow, wrong: bool) -> dict[str, Any]:
    """Return the values that only readable tables have, or write in another way."""
    claim = WRONG if wrong else "yes" if row.exact else "no"
    message = " ".join((row.message or "").split())
    shown = message if len(message) <= 80 else f"{message[:79]}…"
    # Emulated compute updates nothing, so it has no optimiser state to measure.
    memory = row.memory() or row.memory("predicted_memory")
    sync = row.median("sync") if row.step and row.nodes > 1 else None
    share = "" if sync is None else f" ({percent(sync / row.step)})"
    return {
        "cell": row.name,
        "claim": claim if row.nodes > 1 else NOTHING,
        "step_or_status": (
            seconds_text(row.step, row.step) + interval_text(row) if row.step else row.status
        ),
        "exposed_share": seconds_text(sync, row.step) + share,
        "others_sent_bytes": row.median("others_bytes_sent") if row.nodes > 1 else None,
        **{f"{kind}_bytes": memory.get(kind) for kind in KINDS},
        "tensor_bytes": sum(row.memory().values()) or None,
        "predicted_compute_seconds": row.prediction.get("compute_seconds"),
        "predicted_sync_seconds": row.prediction.get("sync_seconds"),
        "measured_seconds": row.step or None,
        "error": row.error,
        "scope": "in scope"
        if row.prediction.get("in_scope")
        else f"out of scope: {row.prediction.get('why') or 'no reason given'}",
        "state": f"{row.status}: {shown}" if shown else row.status,
    }


def _text(row: CellRow, name: str, value: Any) -> str:
    form = COLUMNS[name].form
    if value is None or not form:
        return value or NOTHING
    if form == "s":
        interval = interval_text(row) if name == "step_seconds" else ""
        return seconds_text(value, row.step or value) + interval
    number = value / 1e6 if name.endswith("_bytes") else value
    return format(number, form).replace("%", " %")


def markdown(blocks: Sequence[ComparisonGroup]) -> str:
    """Return the tables of all blocks as Markdown, with headings if there are several."""
    parts = []
    for block in blocks:
        rows = [
            [COLUMNS[name].heading for name in MARKDOWN],
            ["---:" if COLUMNS[name].form else "---" for name in MARKDOWN],
            *([line.texts[name] for name in MARKDOWN] for line in lines(block)),
        ]
        heading = f"**{escape(block.label)}**\n\n" if len(blocks) > 1 else ""
        emulated = f"{escape(what_is_emulated(block.settings))}\n\n" if block.emulated else ""
        table = "".join(f"| {' | '.join(map(escape, row))} |\n" for row in rows)
        parts.append(heading + emulated + table)
    return "\n".join(parts) or "No cells.\n"


def escape(text: str) -> str:
    """Return ``text`` for a cell of a Markdown table: one line, without markup."""
    return " ".join(text.translate(_MARKDOWN_ESCAPES).split())


def csv_text(blocks: Sequence[ComparisonGroup]) -> str:
    """Return all rows as CSV with a header row of names with units; None becomes an empty field."""
    rows = [line.values for block in blocks for line in lines(block)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, rows[0] if rows else ["strategy", "nodes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
