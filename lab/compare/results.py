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
                  seconds_to_accuracy, mean_iteration_seconds, load_per_core, precision,
                  one_process)
    groups        settings of each group by its number, as a text (only from ``lab report``)
    plan          of a comparison whose runs others start (jobs.py): code (digests by file),
                  runs (cell and repeat), to_do (their numbers)
    timelines     by cell: one step, as in a run's timeline.json

docs/comparing.md explains it for readers. All values are seconds and bytes. ``median`` is over the
repeats of the mean over the ranks. ``interval`` is the 95 % interval of the mean over repeats by
Student's t, [null, null] for a single repeat. Cells of different ``group`` are not comparable.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Annotated, Any, NotRequired, Required, TypedDict, TypeVar

from msgspec import Meta, field

from common.errors import UserError
from common.reporting.run_files import RankRow, StepSeconds, StepTime, TimelineFile
from common.utils.atomic_files import write_atomically
from common.utils.grouping import grouped
from common.utils.typed_json import (
    Bytes,
    Count,
    Facts,
    Finite,
    LocalTime,
    Name,
    Seconds,
    Seed,
    Share,
    Step,
    Text,
    check_facts,
    check_version,
    convert,
    encode,
    read_json,
    shown,
)
from lab.compare.outcomes import MachineFacts, read_run_file
from lab.flags import refuse
from lab.report.view import BatchSize, CellRow, LinkRate

T = TypeVar("T")

FORMAT = 1
TIMES = ("step", "data", "forward", "backward", "sync", "update", "wait", "wire")

_Many = Annotated[list[Text], Meta(max_length=100_000)]


class OneProcessEntry(TypedDict):
    """What one process computes in place of the ranks: see ``recompute`` of lab/report."""

    agrees: bool | None
    difference: Finite
    limit: Finite
    mistake: Text
    why_not: Text


class RepeatEntry(TypedDict, total=False):
    """A run of a cell, as far as it is read again; what is not required may be missing."""

    folder: Required[Text]
    seed: Required[Seed]
    status: Required[Annotated[str, Meta(pattern=r"^(done|failed)\Z")]]
    ranks: Required[Annotated[list[RankRow], Meta(max_length=65_536)]]
    losses: Annotated[list[tuple[Step, Finite | None]], Meta(max_length=10_000_000)]
    test_accuracy: Share | None
    seconds_to_accuracy: Seconds | None
    steps_to_accuracy: Count | None
    repeat: Count
    started: LocalTime | None
    mean_iteration_seconds: StepTime | None
    load_per_core: Finite | None
    precision: Text | None
    one_process: OneProcessEntry


class MedianEntry(StepSeconds):
    """Medians over the repeats; None if unknown."""

    peak_memory_bytes: Bytes | None
    root_bytes_sent: Bytes | None
    others_bytes_sent: Bytes | None


class CellEntry(CellRow, frozen=True, kw_only=True):
    """A strategy on a number of nodes, with what the report leaves to this check."""

    group: Annotated[int, Meta(ge=0, le=100_000)]
    repeats: Annotated[list[RepeatEntry], Meta(max_length=100_000)]
    medians: MedianEntry | None = field(name="median")
    intervals: dict[Name, tuple[Finite | None, Finite | None]] | None = field(name="interval")


class PredictedCell(TypedDict, total=False):
    """What the event model says about a cell."""

    step_seconds: Required[StepTime]
    compute_seconds: Seconds
    sync_seconds: Seconds
    in_scope: bool
    why: Text
    bucket_mb: Annotated[float, Meta(gt=0, le=1e9)] | None
    bytes_sent: Annotated[list[Bytes], Meta(max_length=65_536)]


class PredictionEntry(TypedDict):
    """What was predicted before the first run."""

    made: LocalTime
    cells: dict[Name, PredictedCell]
    calibration: NotRequired[Facts]


class PlanEntry(TypedDict):
    """What nodes must agree on; jobs.py compares the runs with those of the settings."""

    code: dict[Text, Text]


class KnownSettings(MachineFacts, total=False):
    """Settings and machine of all runs or of a group, as far as the report computes with them."""

    dataset: Text | None
    scaling: Annotated[str, Meta(pattern=r"^(strong|weak)\Z")] | None
    batch_size: BatchSize | None
    num_classes: Annotated[int, Meta(ge=1, le=10**6)] | None
    until_accuracy: Share | None
    rates: list[LinkRate | None] | None


class Results(TypedDict):
    """The whole file. Settings and environment may hold other facts, which are only shown."""

    kind: Annotated[str, Meta(pattern=r"^(compare|report)\Z")]
    created: LocalTime
    finished: bool
    settings: KnownSettings
    environment: MachineFacts
    warnings: _Many
    differences: NotRequired[_Many]
    prediction: NotRequired[PredictionEntry | None]
    groups: NotRequired[dict[Text, KnownSettings]]
    cells: Annotated[list[CellEntry], Meta(max_length=100_000)]
    timelines: dict[Name, TimelineFile]
    plan: NotRequired[PlanEntry]


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a ``results.json``.

    Raises UserError with the file's name if it is cut, of another program or of a newer format, or
    if a value in it is impossible.
    """
    try:
        found = read_json(path, dict[str, Any])
        check_version(found.get("format"), FORMAT, name=str(path))
        _check(found, str(path))
    except UserError as error:
        raise UserError(f"{error}; the file is unchanged") from error
    return found


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results.json`` completely or not at all.

    Raises UserError, and leaves the file as it is, if a value does not fit the schema.
    """
    _check(results, f"{path} cannot be written")
    write_atomically(path, encode(results, indent=1) + b"\n")


def _check(results: Mapping[str, Any], name: str) -> None:
    """Raise UserError if a value is impossible, or entries do not fit each other."""
    convert(results, Results, name=name)
    facts = {
        "environment": results["environment"],
        "settings": results["settings"],
        "prediction.calibration": (results.get("prediction") or {}).get("calibration", {}),
        **{f"groups[{shown(key)}]": one for key, one in results.get("groups", {}).items()},
    }
    for place, entries in facts.items():
        check_facts(entries, name=f"{name}: {place}")
    ids = [cell["id"] for cell in results["cells"]]
    problems = {f"two cells have the id {one}": ids.count(one) > 1 for one in ids}
    for cell in results["cells"]:
        for repeat in cell["repeats"]:
            path, ranks = PurePath(repeat["folder"]), len(repeat["ranks"])
            problems |= {
                f"cell {cell['id']} has a repeat in {shown(repeat['folder'])}, expected a folder "
                "in the comparison's own": (
                    results["kind"] == "compare" and (path.is_absolute() or ".." in path.parts)
                ),
                f"a repeat of cell {cell['id']} has {ranks} ranks, expected {cell['nodes']}": (
                    repeat["status"] == "done" and ranks != cell["nodes"]
                ),
            }
    refuse({f"{name}: {problem}": is_there for problem, is_there in problems.items()})


def gather(
    folder: Path,
    runs: Sequence[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]],
    groups: Sequence[dict[str, Any] | None] = (),
    *,
    repeats: int = 0,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the cells that these runs make, and a timeline of each by the cells' ids.

    runs : the cell as ``new_cell`` made it, the repeat ({}: none yet; its folder is relative to
    ``folder``) and what it must have in common with others, of which ``groups`` lists what there
    is; what is not in it belongs to the first group. repeats : those of a whole cell of the first
    group.
    """
    cells: dict[str, dict[str, Any]] = {}
    timelines: dict[str, Any] = {}
    for planned, outcome, facts in runs:
        group = groups.index(facts) if facts in groups else 0
        name = planned["id"] + (f"-g{group}" if group else "")
        cell = cells.setdefault(name, planned | {"id": name, "group": group, "repeats": []})
        if outcome:
            cell["oversubscribed"] |= outcome.get("crowded", False)
            cell["repeats"].append({"repeat": len(cell["repeats"])} | outcome)
            path = folder / outcome["folder"] / "timeline.json"
            if outcome["status"] == "done" and name not in timelines and path.exists():
                timelines[name] = read_run_file(path, TimelineFile)
    for cell in cells.values():
        summarise(cell, repeats=0 if cell["group"] else repeats)
    return sorted(cells.values(), key=itemgetter("group", "nodes")), timelines


def differences(
    facts: Sequence[Mapping[str, Any]], names: Sequence[T], show: Callable[[list[T]], str]
) -> list[str]:
    """Return each fact that differs between runs, with the runs of each value.

    names : of the runs, which ``show`` makes a text.
    """
    owners = {
        key: grouped((str(one[key]), name) for one, name in zip(facts, names, strict=True))
        for key in (facts[0] if facts else ())
    }
    return [
        f"{key}: " + "; ".join(f"{value} in {show(who)}" for value, who in values.items())
        for key, values in owners.items()
        if len(values) > 1
    ]


def distinct(values: Sequence[T]) -> list[T]:
    """Return each value once, in order of appearance; the values need no hash."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def summarise(cell: dict[str, Any], *, repeats: int) -> None:
    """Set status, message, median and interval of a cell from its repeats.

    The cell is done when it has ``repeats`` good ones.
    """
    done = [_of_repeat(one["ranks"]) for one in cell["repeats"] if one["status"] == "done"]
    failures = [one["message"] for one in cell["repeats"] if one["status"] == "failed"]
    status = "failed" if failures else "pending"
    if done:
        status = "done" if len(done) >= repeats else "partial"
    columns = {
        name: [row[name] for row in done if row[name] is not None] for name in (done or [{}])[0]
    }
    cell |= {
        "status": status,
        "message": failures[-1] if failures else None,
        "median": {
            name: statistics.median(column) if column else None for name, column in columns.items()
        }
        or None,
        "interval": {name: interval(column) for name, column in columns.items()} or None,
    }


def _of_repeat(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over the ranks; for bytes sent, of the root and of the other ranks.

    None: unknown.
    """
    root, *others = [rank["bytes_sent"] for rank in ranks]
    known = None not in (root, *others)
    return {name: statistics.fmean(rank["seconds"][name] for rank in ranks) for name in TIMES} | {
        "peak_memory_bytes": statistics.fmean(rank["peak_memory_bytes"] for rank in ranks),
        "root_bytes_sent": root if known else None,
        "others_bytes_sent": statistics.fmean(others or [0.0]) if known else None,
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
