"""What a cell is, and how its status, medians and intervals follow from its repeats.

``new_cell`` returns a cell without repeats. ``fill`` puts runs into the cells of a comparison, and
says what differs between groups: ``gather`` puts those of different groups into different cells,
and calls ``summarise`` for each.
"""

import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import asdict, replace

from common.runs import RankRow, TimelineFile, mean_seconds, read_timeline
from common.sync import is_exact
from common.utils.grouping import grouped
from common.utils.typed_json import Facts
from lab.comparison.record import Cell, Comparison, Medians, Repeat, Status
from lab.predict.variants import split_variant

T = TypeVar("T")


@dataclass(frozen=True)
class CellRun:
    """A run of a comparison: its cell, without repeats, and the repeat that it gave, if any.

    facts : what it must have in common with other runs of its cell; None if nothing.
    """

    cell: Cell
    repeat: Repeat | None
    facts: Facts | None = None


def new_cell(
    sync: str, nodes: int, *, batch_size: float, rate: str | None = None, ranks_per_node: int = 1
) -> Cell:
    """Return a cell without repeats."""
    strategy, _ = split_variant(sync)
    return Cell(
        id=f"{sync}-{cell_suffix(nodes, rate, ranks_per_node)}",
        sync=sync,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        rate=rate,
        batch_size=batch_size,
        exact=is_exact(strategy),
    )


def cell_suffix(nodes: int, rate: str | None, ranks_per_node: int = 1) -> str:
    """Return the part of a file's name for nodes and rate, e.g. "n2-1gbit", or "n2x4-1gbit"."""
    size = f"n{nodes}"
    if ranks_per_node > 1:
        size += f"x{ranks_per_node}"
    if rate is None:
        return size
    return f"{size}-" + re.sub(r"[^a-z0-9.]", "", rate.lower())


def fill(
    comparison: Comparison,
    folder: Path,
    runs: Sequence[CellRun],
    show: Callable[[list[int]], str],
    *,
    repeats: int = 0,
) -> None:
    """Set the cells, timelines, groups and differences of a comparison from its runs.

    Runs with different facts are in different groups, of which the largest is the first.

    show : makes a text of places in ``runs``. folder, repeats : see ``gather``.
    """
    facts = {place: run.facts for place, run in enumerate(runs) if run.facts is not None}
    groups = by_frequency(facts.values())
    comparison.cells, comparison.timelines = gather(folder, runs, groups, repeats=repeats)
    comparison.groups = {str(number): group for number, group in enumerate(groups)}
    comparison.differences = differences(list(facts.values()), list(facts), show)


def gather(
    folder: Path, runs: Sequence[CellRun], groups: Sequence[Facts] = (), *, repeats: int = 0
) -> tuple[list[Cell], dict[str, TimelineFile]]:
    """Return the cells that these runs make, and a timeline of each by the cells' ids.

    runs : their repeats' folders are relative to ``folder``. groups : all different facts of the
    runs; a run whose facts are not in it belongs to the first group. repeats : how many a complete
    cell of the first group has; a cell of another group is complete with any.
    """
    numbers = {_hashable(facts): number for number, facts in enumerate(groups)}
    cells: dict[str, Cell] = {}
    timelines: dict[str, TimelineFile] = {}
    for run in runs:
        group = numbers.get(_hashable(run.facts), 0)
        name = run.cell.id
        if group > 0:
            name += f"-g{group}"
        if name not in cells:
            cells[name] = replace(run.cell, id=name, group=group, repeats=[])
        if run.repeat is None:
            continue
        cells[name].repeats.append(run.repeat)
        cells[name].oversubscribed |= run.repeat.crowded
        if run.repeat.done and name not in timelines:
            timeline = read_timeline(folder / run.repeat.folder)
            if timeline is not None:
                timelines[name] = timeline
    for cell in cells.values():
        summarise(cell, repeats=repeats if cell.group == 0 else 0)
    return sorted(cells.values(), key=attrgetter("group", "nodes")), timelines


def differences(
    facts: Sequence[Facts], places: Sequence[int], show: Callable[[list[int]], str]
) -> list[str]:
    """Return each fact that differs between runs, with the runs of each value.

    places : of the runs, which ``show`` makes a text.
    """
    if not facts:
        return []
    found = []
    for key in facts[0]:
        values = (str(facts_of_run[key]) for facts_of_run in facts)
        owners = grouped(zip(values, places, strict=True))
        if len(owners) > 1:
            parts = [f"{value} in {show(runs)}" for value, runs in owners.items()]
            found.append(f"{key}: " + "; ".join(parts))
    return found


def by_frequency(values: Iterable[T]) -> list[T]:
    """Return each value once, the most frequent first, equally frequent ones as they appear.

    Values may be lists and dicts.
    """
    equal = grouped((_hashable(value), value) for value in values)
    return [members[0] for members in sorted(equal.values(), key=len, reverse=True)]


def _hashable(value: Any) -> Hashable:
    """Return a value that is equal to another one exactly if the JSON values are equal."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(entry)) for key, entry in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return value


def summarise(cell: Cell, *, repeats: int) -> None:
    """Set status, message, medians and intervals of a cell from its repeats.

    The cell is done when it has ``repeats`` good ones.
    """
    failures = [repeat.message for repeat in cell.repeats if not repeat.done]
    measured = [_means_over_ranks(run.ranks) for run in cell.runs]
    cell.status = _status(len(measured), len(failures), repeats)
    cell.message = failures[-1] if failures else None
    cell.medians = None
    cell.intervals = None
    if not measured:
        return
    columns = _known_values(measured)
    medians = {name: statistics.median(column) for name, column in columns.items() if column}
    cell.medians = Medians(**medians)
    cell.intervals = {name: interval(column) for name, column in columns.items()}


def _known_values(measured: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return by name what the repeats measured, without what is unknown."""
    columns = {}
    for name in measured[0]:
        columns[name] = [value for means in measured if (value := means[name]) is not None]
    return columns


def _status(done: int, failed: int, wanted: int) -> Status:
    """Return a cell's status from its numbers of good, failed and wanted repeats."""
    if done:
        return "done" if done >= wanted else "partial"
    return "failed" if failed else "pending"


def _means_over_ranks(ranks: Sequence[RankRow]) -> dict[str, float | None]:
    """Return the means over the ranks; for bytes sent, of the root and of the other ranks.

    None: unknown.
    """
    means: dict[str, float | None] = asdict(mean_seconds(ranks))  # by the fields of ``Medians``
    means["peak_memory_bytes"] = statistics.fmean(rank.peak_memory_bytes for rank in ranks)
    means |= dict.fromkeys(("root_bytes_sent", "others_bytes_sent"))
    counted = [rank.bytes_sent for rank in ranks if rank.bytes_sent is not None]
    if len(counted) == len(ranks):
        root, *others = counted
        means["root_bytes_sent"] = root
        means["others_bytes_sent"] = statistics.fmean(others or [0.0])
    return means


def steps_of(cell: Cell) -> list[float]:
    """Return the step of each good repeat, the mean over its ranks; a cell's step is their mean."""
    return [mean_seconds(run.ranks).step for run in cell.runs if run.ranks]


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval of the mean of independent repeats, by Student's t, cut off at 0.

    (None, None) for fewer than two.
    """
    if len(values) < 2:
        return None, None
    from scipy.stats import t

    mean = statistics.fmean(values)
    quantile = float(t.ppf(0.975, len(values) - 1))
    margin = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - margin), mean + margin
