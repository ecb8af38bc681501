"""Read, check and write ``results.json``, which holds what a comparison measured.

A comparison has cells (a strategy on a number of nodes), a cell has repeats (runs), a repeat has a
row for each rank.

    format, kind ("compare" or "report"), created, finished, emulated
    settings      what was asked for: dataset, model, batch_size, steps, nodes, sync, ...
    environment   of the machine, as in a run's environment.json
    warnings      what a reader must know first
    differences   why runs cannot be compared (only from ``lab report``)
    prediction    null, or what was predicted before the first run: made, calibration, cells by id
    cells         id, sync, nodes, rate, batch_size, exact, group, oversubscribed,
                  status (done, partial, failed, pending), message, median, interval,
                  repeats (folder, seed, status, started, ranks, losses, test_accuracy,
                  seconds_to_accuracy)
    groups        settings of each group by its number, as a text (only from ``lab report``)
    plan          of a comparison whose runs others start (job_plan.py): code (digests by file),
                  runs (cell and repeat), to_do (their numbers)
    timelines     by cell: one step, as in a run's timeline.json

docs/comparing.md explains it for readers. All values are seconds and bytes. ``median`` is over the
repeats of the mean over the ranks. ``interval`` is the 95 % interval of the mean over repeats by
Student's t, [null, null] for a single repeat. Cells of different ``group`` are not comparable.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath
from typing import Annotated, Any, NotRequired, Required, TypedDict, TypeVar

from msgspec import Meta

from common.errors import UserError
from common.reporting.run_files import RankRow, StepTime, TimelineFile
from common.utils.atomic_files import read_regular
from common.utils.grouping import grouped
from common.utils.typed_json import (
    MOST_BYTES,
    Bytes,
    Count,
    Finite,
    LocalTime,
    Name,
    Ranks,
    Seconds,
    Seed,
    Share,
    Step,
    Text,
    check_version,
    convert,
    decode,
    shown,
    write_json,
)
from lab.compare.outcomes import MachineFacts, read_run_file
from lab.facts import Facts, check_facts

V = TypeVar("V")

FORMAT = 1
TIMES = ("step", "data", "forward", "backward", "sync", "update", "wait", "wire")

CellId = Annotated[str, Meta(pattern=r"^\w[\w.-]{0,199}\Z")]
LinkRate = Annotated[str, Meta(pattern=r"^[\w. /]{1,40}\Z")] | Annotated[float, Meta(gt=0, le=1e18)]
_BatchSize = Annotated[int, Meta(ge=1, le=2**40)] | Annotated[float, Meta(gt=0, le=2**40)]
BucketSize = Annotated[float, Meta(gt=0, le=1e9)]
_Many = Annotated[list[Text], Meta(max_length=100_000)]


class RepeatEntry(TypedDict, total=False):
    """A run of a cell; what is not required was not recorded, or not yet."""

    folder: Required[Text]
    seed: Required[Seed]
    status: Required[Annotated[str, Meta(pattern=r"^(done|failed)\Z")]]
    ranks: Required[Annotated[list[RankRow], Meta(max_length=65_536)]]
    losses: Annotated[list[tuple[Step, Finite | None]], Meta(max_length=10_000_000)]
    test_accuracy: Share | None
    seconds_to_accuracy: Seconds | None
    steps_to_accuracy: Count | None
    equal_weights: bool
    repeat: Count
    started: LocalTime | None
    timed_steps: Step | None
    message: Text
    machine: Facts
    crowded: bool


class MedianEntry(TypedDict, total=False):
    """Medians over the repeats; None if unknown."""

    step: StepTime | None
    data: Seconds | None
    forward: Seconds | None
    backward: Seconds | None
    sync: Seconds | None
    update: Seconds | None
    wait: Seconds | None
    wire: Finite | None
    peak_memory_bytes: Bytes | None
    root_bytes_sent: Bytes | None
    others_bytes_sent: Bytes | None


class CellEntry(TypedDict):
    """A strategy on a number of nodes."""

    id: CellId
    sync: Name
    nodes: Ranks
    rate: LinkRate | None
    batch_size: _BatchSize | None
    exact: bool
    group: Annotated[int, Meta(ge=0, le=100_000)]
    oversubscribed: bool
    status: Annotated[str, Meta(pattern=r"^(done|partial|failed|pending)\Z")]
    message: Text | None
    repeats: Annotated[list[RepeatEntry], Meta(max_length=100_000)]
    median: MedianEntry | None
    interval: dict[Name, tuple[Finite | None, Finite | None]] | None
    bucket_mb: NotRequired[BucketSize | None]  # of "ddp-auto" and its like, once chosen


class PredictedCell(TypedDict, total=False):
    """What the event model says about a cell."""

    step_seconds: Required[StepTime]
    compute_seconds: Seconds
    sync_seconds: Seconds
    bound: Text
    in_scope: bool
    why: Text
    bucket_mb: BucketSize | None
    bytes_sent: Annotated[list[Bytes], Meta(max_length=65_536)]


class PredictionEntry(TypedDict):
    """What was predicted before the first run."""

    made: LocalTime
    cells: dict[CellId, PredictedCell]
    calibration: NotRequired[Facts]


class PlanEntry(TypedDict):
    """The runs that other programs start: cell and repeat of each; ``to_do`` are their numbers."""

    code: dict[Text, Text]
    runs: Annotated[list[tuple[CellId, Count]], Meta(max_length=1_000_000)]
    to_do: NotRequired[list[Count]]


class Results(TypedDict):
    """The whole file."""

    format: int
    kind: Annotated[str, Meta(pattern=r"^(compare|report)\Z")]
    created: LocalTime
    finished: bool
    emulated: NotRequired[bool]
    settings: Facts
    environment: Facts
    warnings: _Many
    differences: NotRequired[_Many]
    prediction: NotRequired[PredictionEntry | None]
    groups: NotRequired[dict[Text, Facts]]
    cells: Annotated[list[CellEntry], Meta(max_length=100_000)]
    timelines: dict[CellId, TimelineFile]
    plan: NotRequired[PlanEntry]


class KnownSettings(TypedDict, total=False):
    """The settings, of all runs or of a group, with which the report computes."""

    dataset: Text | None
    scaling: Annotated[str, Meta(pattern=r"^(strong|weak)\Z")] | None
    batch_size: _BatchSize | None
    num_classes: Annotated[int, Meta(ge=1, le=10**6)] | None
    until_accuracy: Share | None
    compute: Text | None
    rates: list[LinkRate | None] | None
    flags: list[Text] | None
    gpus: list[Text] | None
    amp: bool | None
    amp_dtype: Annotated[str, Meta(pattern=r"^(fp16|bf16)\Z")] | None


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a ``results.json``.

    Raises UserError with the file's name if it is cut, of another program or of a newer format, or
    if a value in it is impossible.
    """
    try:
        content = read_regular(path, most_bytes=MOST_BYTES)
        found = decode(content, dict[str, Any], name=str(path))
        if "format" not in found:
            raise UserError(f"{path} is no results.json of lab compare")
        check_version(found["format"], FORMAT, name=str(path))
        decode(content, Results, name=str(path))
        _check_rules(found, str(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give the folder of a comparison") from error
    except UserError as error:
        raise UserError(f"{error}; the file is unchanged") from error
    return found


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results.json`` completely or not at all.

    Raises UserError, and leaves the file as it is, if a value does not fit the schema.
    """
    _check_rules(results, f"{path} cannot be written")
    write_json(path, results, Results)


def _check_rules(results: Mapping[str, Any], name: str) -> None:
    """Raise UserError if entries do not fit each other, or a folder leads out of the comparison."""
    prediction = results.get("prediction") or {}
    facts = {
        "environment": (results["environment"], MachineFacts),
        "settings": (results["settings"], KnownSettings),
        "prediction.calibration": (prediction.get("calibration", {}), Facts),
        **{
            f"groups[{shown(group)}]": (settings, KnownSettings)
            for group, settings in results.get("groups", {}).items()
        },
        **{
            f"cells[{index}].repeats.machine": (repeat.get("machine", {}), MachineFacts)
            for index, cell in enumerate(results["cells"])
            for repeat in cell["repeats"]
        },
    }
    for place, (entries, schema) in facts.items():
        check_facts(entries, name=f"{name}: {place}")
        convert(entries, schema, name=f"{name}: {place}")
    ids = [cell["id"] for cell in results["cells"]]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise UserError(f"{name}: two cells have the id {twice}")
    for cell in results["cells"]:
        for repeat in cell["repeats"]:
            path = PurePath(repeat["folder"])
            if results["kind"] == "compare" and (path.is_absolute() or ".." in path.parts):
                raise UserError(
                    f"{name}: cell {cell['id']} has a repeat in {shown(repeat['folder'])}, "
                    "expected a folder in the comparison's own"
                )
            if repeat["status"] == "done" and len(repeat["ranks"]) != cell["nodes"]:
                raise UserError(
                    f"{name}: a repeat of cell {cell['id']} has {len(repeat['ranks'])} ranks, "
                    f"expected {cell['nodes']}"
                )


def take_timeline(
    results: dict[str, Any], cell: Mapping[str, Any], outcome: dict[str, Any], folder: Path
) -> None:
    """Put the timeline of a cell's first repeat that has one into ``results``.

    Called for every finished run by lab compare (runner), its job plans (job_results) and lab
    report (imported_runs); it also sets ``started`` of the outcome.
    """
    if outcome["status"] == "done" and "started" not in outcome:
        outcome["started"] = _started(folder / outcome["folder"])
    timeline = folder / outcome["folder"] / "timeline.json"
    if outcome["status"] == "done" and cell["id"] not in results["timelines"] and timeline.exists():
        results["timelines"][cell["id"]] = read_run_file(timeline, TimelineFile)


def _started(run: Path) -> str | None:
    """Return when a run started, in ISO format: rank 0 writes config.json before the first step."""
    try:
        written = (run / "config.json").stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(written).isoformat(timespec="seconds")


def summarise(cell: dict[str, Any], *, repeats: int) -> None:
    """Set status, message, median and interval of a cell from its repeats.

    The cell is done when it has ``repeats`` good ones.
    """
    by_status = grouped((repeat["status"], repeat) for repeat in cell["repeats"])
    done, failed = by_status.get("done", []), by_status.get("failed", [])
    status = "failed" if failed else "pending"
    if done:
        status = "done" if len(done) >= repeats else "partial"
    rows = [_of_repeat(repeat["ranks"]) for repeat in done]
    names = rows[0] if rows else ()
    values = {name: [value for row in rows if (value := row[name]) is not None] for name in names}
    cell |= {
        "status": status,
        "message": failed[-1]["message"] if failed else None,
        "median": {
            name: statistics.median(column) if column else None for name, column in values.items()
        }
        or None,
        "interval": {name: interval(column) for name, column in values.items()} or None,
    }


def distinct(values: Sequence[V]) -> list[V]:
    """Return each value once, in order of appearance; the values need no hash."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _of_repeat(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the means over the ranks; for bytes sent, of the root and of the other ranks.

    None: unknown.
    """
    row: dict[str, float | None] = {
        name: statistics.fmean(rank["seconds"][name] for rank in ranks) for name in TIMES
    }
    sent = [rank["bytes_sent"] for rank in ranks]
    known = None not in sent
    return row | {
        "peak_memory_bytes": statistics.fmean(rank["peak_memory_bytes"] for rank in ranks),
        "root_bytes_sent": sent[0] if known else None,
        "others_bytes_sent": statistics.fmean(sent[1:] or [0.0]) if known else None,
    }


def interval(values: Sequence[float]) -> list[float | None]:
    """Return the 95 % interval of the mean of independent repeats, by Student's t, cut off at 0.

    [None, None] for fewer than two.
    """
    if len(values) < 2:
        return [None, None]
    from scipy.stats import t

    margin = (
        float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    )
    return [max(0.0, statistics.fmean(values) - margin), statistics.fmean(values) + margin]
