"""The table of cells: ``table.md`` to paste, ``table.csv`` to compute with, tables to look at.

``lines(block)`` has every value and its text; Markdown, CSV, page and terminal choose from them.
Texts are rounded. The CSV holds the exact numbers, in seconds, bytes and ratios.
"""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from common.say import percent
from common.sync.memory_cost import KINDS, Memory
from lab.report.causes import whole
from lab.report.losses import loss_table
from lab.report.view import (
    NOTHING,
    CellRow,
    ComparisonGroup,
    Place,
    interval_text,
    link_text,
    seconds_text,
    what_is_emulated,
)

_SECTIONS = ("data", "forward", "backward", "sync", "wait", "wire", "update")
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
    best: set[str]  # the columns of which the row has the best value on its number of nodes


# By name of the value, which ends with its unit: seconds have the decimals of the step, bytes are
# written in MB.
COLUMNS = {
    "cell": Column("cell"),
    "strategy": Column("strategy"),
    "nodes": Column("nodes", "d"),
    "ranks": Column("ranks", "d"),
    "claim": Column("claims exact"),
    "step_or_status": Column("step, s [95 %]"),
    "exposed_share": Column("exposed comm., s"),
    "step_seconds": Column("median step, s [95 %]", "s", min),
    "data_seconds": Column("data, s", "s"),
    "forward_seconds": Column("forward, s", "s"),
    "backward_seconds": Column("backward, s", "s"),
    "sync_seconds": Column("exposed comm. (sync), s", "s", min),
    "wait_seconds": Column("waiting, s", "s"),
    "own_work_seconds": Column("the strategy computes, s", "s"),
    "update_seconds": Column("update, s", "s"),
    "mean_iteration_seconds": Column("mean iteration without the first, s [95 %]", "s", min),
    "train_accuracy_ratio": Column("accuracy, last step", ".2%"),
    "last_train_loss": Column("loss, last step", ".4f"),
    "test_accuracy_ratio": Column("test accuracy", ".2%"),
    "test_loss": Column("test loss", ".4f"),
    "speedup_ratio": Column("speed-up", ".2f", max),
    "efficiency_ratio": Column("efficiency", ".1%", max),
    "samples_per_second": Column("samples/s", ".0f", max),
    "root_sent_bytes": Column("rank 0 sent, MB", ".2f", min),
    "others_sent_bytes": Column("other ranks sent, MB", ".2f", min),
    "busiest_link_bytes": Column("busiest link, MB", ".2f", min),
    "planned_busiest_link_bytes": Column("by the plan, MB", ".2f"),
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
    "scope": Column("scope"),
    "state": Column("status"),
}
_COSTS = (
    *("mean_iteration_seconds", "speedup_ratio", "efficiency_ratio", "samples_per_second"),
    *("root_sent_bytes", "others_sent_bytes", "peak_memory_bytes"),
)
_LINKS = ("busiest_link_bytes", "planned_busiest_link_bytes")
_FORETOLD = ("predicted_step_seconds", "prediction_error_ratio")
_TIMES = (
    *("strategy", "nodes", "ranks", "claim", "step_seconds", "data_seconds", "forward_seconds"),
    *("backward_seconds", "sync_seconds", "wait_seconds", "own_work_seconds", "update_seconds"),
)
# The columns of each table; those without any value are left out.
RESULTS = (
    *("strategy", "nodes", "ranks", "mean_iteration_seconds", "step_seconds", "speedup_ratio"),
    *(
        "exposed_share",
        "last_train_loss",
        "train_accuracy_ratio",
        "test_accuracy_ratio",
        "test_loss",
        *_FORETOLD,
    ),
)
TIMES = (*_TIMES, "state")
COSTS = (
    *("strategy", "nodes", "ranks", *_COSTS[:-1], *_LINKS, _COSTS[-1]),
    *("largest_peak_memory_bytes", *_FORETOLD),
)
MEMORY = (
    *("strategy", "nodes", *(f"{kind}_bytes" for kind in KINDS)),
    *("tensor_bytes", "predicted_tensor_bytes"),
)
PREDICTION = (
    *("cell", "predicted_compute_seconds", "predicted_sync_seconds", "predicted_step_seconds"),
    *("measured_seconds", "prediction_error_ratio", "scope"),
)
MARKDOWN = (
    *(*_TIMES, *_COSTS, *_LINKS, "optimizer_state_bytes", "tensor_bytes", *_FORETOLD),
    *("last_train_loss", "test_accuracy_ratio", "test_loss", "state"),
)


# What follows from the whole step: best only where the strategies make the difference.
_BY_TIME = (
    "step_seconds",
    "mean_iteration_seconds",
    "speedup_ratio",
    "efficiency_ratio",
    "samples_per_second",
)


_WITH_INTERVAL = {"step_seconds": "step", "mean_iteration_seconds": "iteration"}


def heading(name: str, place: Place) -> str:
    """Return a column's heading. place : what the numbers of ``nodes`` count in this table."""
    return f"{place}s" if name == "nodes" else COLUMNS[name].heading


def with_values(names: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """Return the columns of which at least one line has a value."""
    return [name for name in names if any(line.texts[name] != NOTHING for line in lines)]


def lines(block: ComparisonGroup) -> list[Line]:
    """Return the rows of a block's tables."""
    found = [_line(block, row) for row in block.rows]
    for nodes in block.nodes_beyond_one:
        right = [line for line in found if line.row.nodes == nodes and not line.row.claim.wrong]
        measured = [line.row for line in right if line.row.step]
        # Else something else than communication makes most of the difference.
        certain = bool(measured) and whole(measured).by_messages
        for name in COLUMNS:
            if certain or name not in _BY_TIME:
                _mark_best(right, name)
    return found


def _line(block: ComparisonGroup, row: CellRow) -> Line:
    values = _values(block, row)
    readable = values | _readable(row)
    if block.ranks_per_node == 1:
        readable["ranks"] = None  # the column "nodes" says it
    texts = {name: _text(row, name, readable[name]) for name in COLUMNS}
    return Line(row, values, texts, set())


def _mark_best(lines: Sequence[Line], name: str) -> None:
    """Mark the lines with the best value of a column, on the same number of nodes.

    Lines with the same text are equally good; where all have it, none is best.
    """
    best = COLUMNS[name].best
    known = [line for line in lines if line.values.get(name) is not None]
    if best is None or len({line.texts[name] for line in known}) < 2:
        return
    first = best(known, key=lambda line: line.values[name])
    for line in known:
        if line.texts[name] == first.texts[name]:
            line.best.add(name)


# --- the values of the CSV, in its order ---


def _values(block: ComparisonGroup, row: CellRow) -> dict[str, Any]:
    """Return a row of the CSV; what is unknown is None."""
    settings = {
        "strategy": row.sync,
        "nodes": row.nodes,
        "ranks": row.ranks,
        "group": block.group,
        "rate": link_text(row.cell.rate),
        "exact": int(row.exact),
        "emulated": int(block.emulated),
        "status": row.cell.status,
        "repeats": len(row.runs),
        "global_batch_size_samples": row.cell.batch_size,
    }
    learned = {
        "last_train_loss": row.last_loss,
        "train_accuracy_ratio": row.mean("train_accuracy"),
        "test_accuracy_ratio": row.mean("test_accuracy"),
        "test_loss": row.mean("test_loss"),
    }
    return settings | _times(row) | _costs(row) | _predicted(row) | learned


def _times(row: CellRow) -> dict[str, Any]:
    low, high = row.interval("step") or (None, None)
    medians = asdict(row.cell.medians) if row.cell.medians else {}
    return {
        "step_seconds": row.step or None,
        "step_seconds_low95": low,
        "step_seconds_high95": high,
        **{f"{name}_seconds": medians.get(name) for name in _SECTIONS},
        "own_work_seconds": row.own_work,
        "mean_iteration_seconds": row.mean("mean_iteration_seconds"),
    }


def _costs(row: CellRow) -> dict[str, Any]:
    samples_per_second = None
    if row.cell.batch_size and row.seconds:
        samples_per_second = row.cell.batch_size / row.seconds
    return {
        "speedup_ratio": row.speedup,
        "efficiency_ratio": row.efficiency,
        "samples_per_second": samples_per_second,
        "root_sent_bytes": row.medians.root_bytes_sent,
        "others_sent_bytes": row.medians.others_bytes_sent,
        "busiest_link_bytes": row.busiest_link_bytes,
        "planned_busiest_link_bytes": row.planned_busiest_link_bytes,
        "peak_memory_bytes": row.medians.peak_memory_bytes,
        "largest_peak_memory_bytes": max(row.per_rank("peak_memory_bytes"), default=None),
        **_by_kind(row.memory),
    }


def _by_kind(memory: Memory) -> dict[str, int | None]:
    return {f"{kind}_bytes": memory.get(kind) for kind in KINDS}


def _predicted(row: CellRow) -> dict[str, Any]:
    values: dict[str, Any] = {
        "predicted_tensor_bytes": sum(row.predicted_memory.values()) or None,
        "predicted_step_seconds": None,
        "prediction_error_ratio": None,
        "prediction_in_scope": None,
    }
    if row.prediction is not None:
        values |= {
            "predicted_step_seconds": row.prediction.step_seconds,
            "prediction_error_ratio": row.error,
            "prediction_in_scope": int(row.prediction.in_scope),
        }
    return values


# --- the values that only readable tables have, or write in another way ---


def _readable(row: CellRow) -> dict[str, Any]:
    """Return what readable tables show besides ``_values``, or in place of it."""
    others_sent = row.medians.others_bytes_sent if row.nodes > 1 else None
    return {
        "cell": row.name,
        "claim": _claim(row),
        "step_or_status": _step_or_status(row),
        "exposed_share": _exposed_share(row),
        "others_sent_bytes": others_sent,
        # Emulated compute updates nothing, so it has no optimiser state to measure.
        **_by_kind(row.memory or row.predicted_memory),
        "tensor_bytes": sum(row.memory.values()) or None,
        **_prediction(row),
        "measured_seconds": row.step or None,
        "state": _state(row),
    }


def _claim(row: CellRow) -> str:
    """Return whether the strategy claims to be exact, and whether that is wrong."""
    if row.nodes == 1:
        return NOTHING
    if row.claim.wrong:
        return WRONG
    return "yes" if row.exact else "no"


def _step_or_status(row: CellRow) -> str:
    if not row.step:
        return row.cell.status
    return seconds_text(row.seconds, row.step) + interval_text(row.interval("seconds"), row.step)


def _exposed_share(row: CellRow) -> str:
    if not row.step or row.nodes == 1:
        return NOTHING
    sync = row.medians.sync
    return f"{seconds_text(sync, row.step)} ({percent(sync / row.step)})"


def _prediction(row: CellRow) -> dict[str, Any]:
    """Return what readable tables show of a prediction that the CSV does not have."""
    prediction = row.prediction
    if prediction is None:  # no table shows it
        return dict.fromkeys(("predicted_compute_seconds", "predicted_sync_seconds", "scope"))
    scope = "in scope"
    if not prediction.in_scope:
        scope = f"out of scope: {prediction.why or 'no reason given'}"
    return {
        "predicted_compute_seconds": prediction.compute_seconds,
        "predicted_sync_seconds": prediction.sync_seconds,
        "scope": scope,
    }


def _state(row: CellRow) -> str:
    """Return the cell's status, with the beginning of its message, if it has one."""
    message = " ".join((row.cell.message or "").split())
    if not message:
        return row.cell.status
    if len(message) > 80:
        message = f"{message[:79]}…"
    return f"{row.cell.status}: {message}"


def _text(row: CellRow, name: str, value: Any) -> str:
    """Return a value as its column writes it; NOTHING if it is None."""
    form = COLUMNS[name].form
    if value is None or not form:
        return value or NOTHING
    if form == "s":
        ends = row.interval(_WITH_INTERVAL[name]) if name in _WITH_INTERVAL else None
        return seconds_text(value, row.step or value) + interval_text(ends, row.step)
    if name.endswith("_bytes"):
        return format(value / 1e6, form)
    return format(value, form).replace("%", " %")


def markdown(blocks: Sequence[ComparisonGroup]) -> str:
    """Return the tables of all blocks as Markdown, with headings if there are several."""
    parts = []
    for block in blocks:
        part = ""
        if len(blocks) > 1:
            part += f"**{escape(block.label)}**\n\n"
        if block.emulated:
            part += f"{escape(what_is_emulated(block.settings))}\n\n"
        parts.append(part + _markdown_table(block))
    return "\n".join(parts) or "No cells.\n"


def _markdown_table(block: ComparisonGroup) -> str:
    found = lines(block)
    names = with_values(MARKDOWN, found)
    headings = [heading(name, block.place) for name in names]
    alignments = ["---:" if COLUMNS[name].form else "---" for name in names]
    rows = [[line.texts[name] for name in names] for line in found]
    table = _pipes([headings, alignments, *rows])
    losses = loss_table(block)
    if losses is None:
        return table
    alignments = ["---:"] * len(losses.headings)
    return f"{table}\nTraining loss:\n\n{_pipes([losses.headings, alignments, *losses.rows])}"


def _pipes(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(map(escape, row))} |\n" for row in rows)


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
