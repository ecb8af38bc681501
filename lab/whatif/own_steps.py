"""The reader's own measured steps, as sets that the page of ``lab whatif`` shows.

``read_own`` reads comparisons, tables and folders of runs, ``steps_of_comparison`` has those of a
comparison that was read already. Both return sets that differ in strategy and number of nodes
alone. Imports no torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import UserError
from common.say import count
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from common.utils.paths import REPOSITORY
from common.utils.typed_json import shown
from lab.comparison.cell import steps_of
from lab.comparison.record import Cell, Comparison, LinkRate, read_comparison
from lab.predict.cluster import generation_of
from lab.predict.observed import ObservedStep, read_observed
from lab.predict.own_model import model_names
from lab.units import parse_rate
from lab.whatif.data import MOST_NODES, MeasuredPoint, MeasuredSet, drawn_names

_SHIPPED = REPOSITORY / "reports/samples/compare-digits-1gbit"
_MOST_STEPS = 2000  # of a file: more make no picture


@dataclass(frozen=True)
class OwnSteps:
    """The sets of the reader's measurements; problems : why others are not drawn."""

    sets: list[MeasuredSet] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _OneRank:
    """The step of one rank alone, as measured on so many ranks."""

    ranks: int
    seconds: float
    samples: int


@dataclass(frozen=True)
class _Measurement:
    """Steps that were measured together. one_rank : None: not known."""

    name: str
    about: str
    backend: str | None
    one_rank: _OneRank | None
    steps: Sequence[ObservedStep]


@dataclass(frozen=True)
class _Batch:
    """The batch of some steps: of a rank ("weak"), or of all ranks together ("strong")."""

    scaling: str
    size: int
    steps: Sequence[ObservedStep]


def read_own(paths: Sequence[Path]) -> OwnSteps:
    """Return the sets of the reader's files: comparisons and tables in order, then the runs.

    paths : folders or ``results.json`` of ``lab compare`` and ``lab report``, tables (``.csv``) as
    for ``lab predict --fit``, and folders of runs. Raises UserError if one cannot be read.
    """
    measurements = []
    runs: list[ObservedStep] = []
    for path in paths:
        results = path
        if path.is_dir():
            results = path / "results.json"
        if results.suffix == ".json" and results.is_file():
            folder = results.resolve().parent.name
            measurements.append(_of_comparison(read_comparison(results), folder))
        elif path.is_dir():
            runs += _observed(path)
        else:
            measurements.append(_of_table(path))
    if runs:
        measurements.append(_of_runs(runs))
    return _drawn(measurements)


def shipped_sets() -> list[MeasuredSet]:
    """Return the comparison that comes with a checkout; an installed package has none."""
    if not _SHIPPED.is_dir():
        return []
    return read_own([_SHIPPED]).sets


def steps_of_comparison(comparison: Comparison, name: str) -> OwnSteps:
    """Return the sets of a comparison whose folder is called ``name``."""
    return _drawn([_of_comparison(comparison, name)])


def with_own_ids(sets: Sequence[MeasuredSet]) -> list[MeasuredSet]:
    """Return the sets with ids that no other has: a number follows where an earlier set has it."""
    found: list[MeasuredSet] = []
    taken: set[str] = set()
    for each in sets:
        name = each.id
        number = 1
        while name in taken:
            number += 1
            name = f"{each.id}-{number}"
        taken.add(name)
        found.append(replace(each, id=name))
    return found


def _drawn(measurements: Sequence[_Measurement]) -> OwnSteps:
    found = OwnSteps()
    for measurement in measurements:
        sets = _sets_of(measurement)
        found.sets.extend(sets)
        if not sets:
            found.problems.append(
                f"{measurement.name} has no step on two or more nodes of a strategy that this page "
                "draws."
            )
    return found


# -- what was measured --------------------------------------------------------------------------


def _of_comparison(comparison: Comparison, name: str) -> _Measurement:
    cells = [cell for cell in comparison.cells if cell.medians is not None]
    _refuse_many(len(cells), "cell", name)
    steps = [_of_cell(comparison, cell, name) for cell in cells]
    about = "Measured by this project, with Gloo over TCP."
    if comparison.emulated:
        about = "Emulated nodes with Gloo: layers sleep for measured times, and all bytes travel."
    return _Measurement(name, about, "gloo", _computing(steps), steps)


def _of_cell(comparison: Comparison, cell: Cell, name: str) -> ObservedStep:
    assert cell.medians is not None
    where = f"{name}, cell {cell.id}"
    if cell.batch_size is None or cell.batch_size != int(cell.batch_size):
        raise UserError(
            f"--runs: {where}: batch_size: got {shown(cell.batch_size)}, expected a whole number"
        )
    nodes = cell.nodes
    if cell.rate is None:
        nodes = _hosts_of(cell)
    model = comparison.known(cell.group).model
    return ObservedStep(
        where=where,
        nodes=nodes,
        ranks_per_node=cell.ranks // nodes,
        strategy=cell.sync,
        global_batch=int(cell.batch_size),
        step_seconds=fmean(steps_of(cell) or [cell.medians.step]),
        sync_seconds=cell.medians.sync,
        rate_bits=_bits(cell.rate, where),
        model=model,
    )


def _bits(rate: LinkRate | None, where: str) -> float | None:
    if isinstance(rate, str):
        return parse_rate(rate, f"--runs: {where}: rate")
    return rate


def _hosts_of(cell: Cell) -> int:
    """Return the number of hosts of a cell's ranks: without a rate they may share one machine."""
    hosts = len({row.place for row in cell.runs[0].ranks})
    if cell.ranks % hosts:
        return 1
    return hosts


def _of_table(path: Path) -> _Measurement:
    steps = _observed(path)
    _refuse_many(len(steps), "row", str(path))
    return _Measurement(path.name, "", None, None, steps)


def _of_runs(steps: Sequence[ObservedStep]) -> _Measurement:
    name = f"{len(steps)} runs"
    if len(steps) == 1:
        name = Path(steps[0].where).resolve().name
    backends = {step.backend for step in steps}
    backend = backends.pop() if len(backends) == 1 else None
    return _Measurement(name, "Measured by this project.", backend, _computing(steps), steps)


def _observed(path: Path) -> list[ObservedStep]:
    """Return the steps of a table or of folders of runs."""
    steps = read_observed([path], flag="--runs")
    for step in steps:
        if step.nodes > MOST_NODES:
            raise UserError(
                f"--runs: {step.where}: nodes: got {step.nodes:,}, give at most {MOST_NODES:,}"
            )
    return steps


def _refuse_many(number: int, noun: str, name: str) -> None:
    if number > _MOST_STEPS:
        raise UserError(
            f"--runs: {name} has {count(number, noun)}: the page reads up to {_MOST_STEPS:,}"
        )


def _computing(steps: Sequence[ObservedStep]) -> _OneRank | None:
    """Return what computes of the step on the fewest ranks, as the step of one rank alone."""
    found = []
    for step in steps:
        if step.sync_seconds is None:
            continue
        samples = round(step.global_batch / step.ranks)
        found.append(_OneRank(step.ranks, step.step_seconds - step.sync_seconds, samples))
    return min(found, key=lambda one: (one.ranks, one.seconds), default=None)


# -- sets ---------------------------------------------------------------------------------------


def _sets_of(measurement: _Measurement) -> list[MeasuredSet]:
    """Return a set for each model, rate, number of ranks on a node, and batch."""
    one_rank = measurement.one_rank
    alone = next((step for step in measurement.steps if step.ranks == 1), None)
    if alone is not None:
        one_rank = _OneRank(1, alone.step_seconds, alone.global_batch)
    names = [name for name in drawn_names() if name != "none"]
    drawn = []
    for step in measurement.steps:
        if step.nodes > 1 and step.strategy in names:
            drawn.append(((step.model, step.rate_bits, step.ranks_per_node), step))
    sets = []
    for alike in grouped(drawn).values():
        for batch in _by_batch(alike):
            sets.append(_set_of(replace(measurement, one_rank=one_rank), batch))
    return sets


def _by_batch(steps: Sequence[ObservedStep]) -> list[_Batch]:
    """Return the steps by their batch: weak scaling if a rank's batch stays the same."""
    of_rank = {step.global_batch / step.ranks for step in steps}
    if len(of_rank) == 1 and len({step.nodes for step in steps}) > 1:
        return [_Batch("weak", round(of_rank.pop()), steps)]
    by_size = grouped((step.global_batch, step) for step in steps)
    return [_Batch("strong", size, alike) for size, alike in by_size.items()]


def _set_of(measurement: _Measurement, batch: _Batch) -> MeasuredSet:
    points = []
    for step in batch.steps:
        points.append(MeasuredPoint(step.strategy, step.nodes, step.step_seconds, ""))
    return MeasuredSet(
        id=re.sub(r"[^\w.-]+", "-", measurement.name, flags=re.ASCII),
        title=_title(measurement, batch),
        about=_about(measurement, batch.steps[0]),
        family=measurement.backend or "",
        is_published=False,
        state=_state(measurement, batch),
        points=points,
    )


def _is_known(model: str | None) -> bool:
    return model in model_names()


def _state(measurement: _Measurement, batch: _Batch) -> dict[str, Any]:
    """Return what these steps say of the page's state."""
    first = batch.steps[0]
    drawn = {step.strategy for step in batch.steps}
    strategies = [name for name in STRATEGIES if name in drawn]
    state: dict[str, Any] = {
        "ranks_per_node": first.ranks_per_node,
        "scaling": batch.scaling,
        "batch_size": batch.size,
        "nodes": max(step.nodes for step in batch.steps),
        "strategies": strategies,
        "focus": strategies[-1],
    }
    if first.model is not None and _is_known(first.model):
        state |= {"model": first.model, "gradient_type": "fp32", "bucket_mb": None}
    if first.rate_bits is not None:
        state |= {"rate_gbit": first.rate_bits / 1e9, "latency_us": None, "inside_gbit": None}
    if measurement.backend is not None:
        transport = generation_of(measurement.backend, "tcp", first.rate_bits)
        state |= {"costs": "typical", "backend": measurement.backend, "transport": transport}
    if measurement.one_rank is not None:
        step_ms = float(f"{1e3 * measurement.one_rank.seconds:.5g}")
        state |= {"costs": "typical", "step_ms": step_ms, "batch": measurement.one_rank.samples}
    return state


def _about(measurement: _Measurement, first: ObservedStep) -> str:
    """Return where steps were measured, and what of the reader's settings stays."""
    sentences = []
    if measurement.about:
        sentences.append(measurement.about)
    if first.rate_bits is None:
        sentences.append("The links are not stated: yours stay.")
    if not _is_known(first.model):
        sentences.append("The model is not stated, or not in this page: yours stays.")
    one_rank = measurement.one_rank
    if one_rank is None:
        sentences.append("The step of one rank alone is not stated: yours stays.")
    elif one_rank.ranks > 1:
        sentences.append(
            "One rank alone was not measured: its step is taken to be a step of these less its "
            "exposed communication."
        )
    return " ".join(sentences)


def _title(measurement: _Measurement, batch: _Batch) -> str:
    first = batch.steps[0]
    nodes = ", ".join(str(number) for number in sorted({step.nodes for step in batch.steps}))
    title = f"{first.model or 'Steps'}: {nodes} nodes"
    if first.ranks_per_node > 1:
        title += f" of {first.ranks_per_node} ranks"
    if first.rate_bits is not None:
        title += f", {first.rate_bits / 1e9:g} Gbit/s"
    owner = "a rank" if batch.scaling == "weak" else "in all"
    return f"{title}, {count(batch.size, 'sample')} {owner} ({measurement.name})"
