"""Measured steps for the page of ``lab whatif``, each with the state that it was measured in.

``published_sets`` has what others published, ``shipped_sets`` the comparison that comes with the
project, and ``sets_of`` the reader's own reports, tables and runs. measured.js makes the same sets
of files that are dropped onto the page. Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from common.errors import UserError, count
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from common.utils.paths import REPOSITORY
from lab.comparison.record import Cell, Comparison, read_comparison
from lab.predict.cluster import TypicalCluster
from lab.predict.common_models import common_models
from lab.predict.observed import ObservedStep, read_observed
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import PublishedStep, published_path, read_published
from lab.predict.readable import duration_text
from lab.predict.scenario import Scenario
from lab.units import parse_rate

_SHIPPED = REPOSITORY / "reports/samples/compare-digits-1gbit/results.json"
_UNKNOWN_GBIT = 10.0  # of a link whose rate is not stated, unless software passes more
_AS_IN_MODELS = "_cifar10"  # common models that are models of this project
# What a reader may have set in the page, and what no measured set says.
_TYPICAL = {"costs": "typical", "inside_gbit": None, "latency_us": None, "bucket_mb": None}


@dataclass(frozen=True)
class MeasuredPoint:
    """The measured step of a strategy on a number of nodes, and what was published about it."""

    strategy: str
    nodes: int
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class MeasuredSet:
    """Steps that differ in strategy and number of nodes alone.

    family : "gloo" or "nccl", or "" if it is not known. state : of the page, as far as the
    measurement says it; the reader's own state has the rest.
    """

    id: str
    title: str
    about: str
    family: str
    state: Mapping[str, Any]
    points: Sequence[MeasuredPoint]


@dataclass(frozen=True)
class _Measurement:
    """Steps of one origin, in any settings.

    own : seconds and samples of a rank's step alone, if known.
    """

    name: str
    about: str
    steps: Sequence[ObservedStep]
    backend: str | None = None
    own: tuple[float, float] | None = None


def published_sets() -> list[MeasuredSet]:
    """Return a set for each published setting, in the file's order."""
    beliefs = Beliefs.of(load_priors())
    rows = read_published(published_path())
    sets = []
    numbers: Counter[str] = Counter()
    for _, found in groupby(rows, _published_setting):
        same = list(found)
        group = same[0].group
        numbers[group] += 1
        name = group if numbers[group] == 1 else f"{group}-{numbers[group]}"
        sets.append(_published_set(name, same, beliefs))
    return sets


def _published_setting(row: PublishedStep) -> tuple[object, ...]:
    """Return all that rows have in common which differ in strategy and number of nodes alone."""
    return (
        *(row.group, row.model, row.software, row.transport, row.rate_gbit, row.grad_megabytes),
        *(row.ranks_per_node, row.batch_per_rank, row.one_rank_batch, row.one_rank_step_s),
    )


def _published_set(name: str, rows: Sequence[PublishedStep], beliefs: Beliefs) -> MeasuredSet:
    first = rows[0]
    scenario = first.cell(beliefs).scenario
    points = [
        MeasuredPoint(row.strategy, row.nodes, row.measured_step_s, row.columns.get("note", ""))
        for row in rows
    ]
    assert scenario.cluster is not None
    assert scenario.step_seconds is not None
    assert scenario.step_samples is not None
    state = {
        **_TYPICAL,
        **_published_model(first, scenario),
        **_links(scenario.cluster, first.rate_gbit),
        "ranks_per_node": first.ranks_per_node,
        "step_ms": round(1e3 * scenario.step_seconds, 6),
        "batch": round(scenario.step_samples),
        "scaling": "weak",
        "batch_size": scenario.batch_size,
        **_shown(points),
    }
    links = first.transport
    if first.rate_gbit is not None:
        links += f" at {first.rate_gbit:g} Gbit/s"
    title = (
        f"{first.group}: {first.model}, {first.software}, {links}, {first.grad_megabytes:g} MB, "
        f"batch {first.one_rank_batch:g} in {duration_text(first.one_rank_step_s)}"
    )
    about = [_source(first), *_assumed(scenario.cluster, first.rate_gbit)]
    if scenario.node_step_seconds is not None:
        about.append(
            f"The step of one node with all its ranks took "
            f"{duration_text(scenario.node_step_seconds)}; the page takes a typical loss instead, "
            "lab predict --node-step-time takes the number."
        )
    return MeasuredSet(name, title, " ".join(about), first.backend, state, points)


def _source(row: PublishedStep) -> str:
    facts = [row.columns.get(name, "") for name in ("hardware", "source")]
    return "; ".join([count(row.ranks_per_node, "rank") + " a node", *filter(None, facts)]) + "."


def _published_model(row: PublishedStep, scenario: Scenario) -> dict[str, Any]:
    """Return the model as the page names it, and the type of its gradients."""
    nbytes = 1e6 * row.grad_megabytes
    model = common_models().get(scenario.calibration.model)
    if model is None:
        return {"model": "own", "parameters": round(nbytes / 4), "gradient_type": "fp32"}
    # Between 2 and 4 bytes a parameter, in the middle of their logarithms.
    in_half = nbytes < 8**0.5 * model.parameters
    return {
        "model": model.name.removesuffix(_AS_IN_MODELS),
        "gradient_type": "fp16" if in_half else "fp32",
    }


def _links(cluster: TypicalCluster, rate_gbit: float | None) -> dict[str, Any]:
    """Return software and links; a link of no known rate is one that limits nothing."""
    if rate_gbit is None:
        software_gbit = float(cluster.most_bits / cluster.values.line_share) / 1e9
        rate_gbit = max(_UNKNOWN_GBIT, software_gbit)
    return {
        "backend": cluster.backend,
        "transport": cluster.transport,
        "rate_gbit": rate_gbit,
    }


def _assumed(cluster: TypicalCluster, rate_gbit: float | None) -> list[str]:
    """Return a sentence about a rate that nobody stated."""
    if rate_gbit is not None:
        return []
    taken = _links(cluster, rate_gbit)["rate_gbit"]
    return [
        f"The rate of the links is not stated: the page takes {taken:.3g} Gbit/s, more than "
        f"{cluster.name} passes ({cluster.most_bits / 1e9:.2g} Gbit/s), so the software is the "
        "limit."
    ]


def _shown(points: Sequence[MeasuredPoint]) -> dict[str, Any]:
    """Return what the page shows of these points: their strategies, on the most nodes."""
    found = {point.strategy for point in points}
    strategies = [name for name in STRATEGIES if name in found]
    return {
        "nodes": max(point.nodes for point in points),
        "strategies": strategies,
        "focus": "ddp" if "ddp" in found else strategies[-1],
    }


def shipped_sets() -> list[MeasuredSet]:
    """Return the comparison that comes with a checkout; an installed package has none."""
    if not _SHIPPED.is_file():
        return []
    sets = comparison_sets(read_comparison(_SHIPPED), _SHIPPED.parent.name)
    return [replace(found, id="shipped") for found in sets]


def sets_of(paths: Sequence[Path]) -> list[MeasuredSet]:
    """Return the sets of the reader's own measurements.

    paths : folders or ``results.json`` of ``lab compare`` and ``lab report``, tables (``.csv``) as
    for ``lab predict --fit``, and folders of runs.

    Raises UserError if one cannot be read, or has nothing that the page can show.
    """
    sets: list[MeasuredSet] = []
    for path in paths:
        found = _sets(_read(path))
        if not found:
            raise UserError(
                f"--runs: {path} has no step on two or more nodes: the page shows nodes that are "
                "machines of their own, or emulated ones (lab compare --rate)"
            )
        sets += found
    return [replace(found, id=f"runs-{number}") for number, found in enumerate(sets, 1)]


def _read(path: Path) -> _Measurement:
    results = path / "results.json" if path.is_dir() else path
    if results.suffix == ".json" and results.is_file():
        return _of_comparison(read_comparison(results), results.resolve().parent.name)
    try:
        steps = read_observed([path])
    except UserError as error:
        raise UserError(str(error).replace("--fit:", "--runs:")) from error
    backends = {step.settings.get("backend") for step in steps if step.settings is not None}
    backend = backends.pop() if len(backends) == 1 else None
    return _Measurement(path.resolve().name, "", steps, backend=backend)


def comparison_sets(comparison: Comparison, name: str) -> list[MeasuredSet]:
    """Return the sets of a comparison called ``name``; none if nothing ran on several nodes."""
    return _sets(_of_comparison(comparison, name))


def _of_comparison(comparison: Comparison, name: str) -> _Measurement:
    about = "Measured by this project, with Gloo over TCP."
    if comparison.emulated:
        about = "Emulated nodes with Gloo: layers sleep for measured times, and all bytes travel."
    steps = []
    computing = []
    for cell in comparison.cells:
        if cell.medians is None or cell.batch_size is None:
            continue
        known = comparison.known()
        if comparison.group_facts(cell.group):
            known = comparison.known(cell.group)
        steps.append(_of_cell(cell, known.model))
        seconds = cell.medians.step - cell.medians.sync
        computing.append((cell.ranks, seconds, cell.batch_size / cell.ranks))
    # Of the fewest ranks, and where nothing slows backward down.
    own = min(computing)[1:] if computing else None
    return _Measurement(name, about, steps, backend="gloo", own=own)


def _of_cell(cell: Cell, model: str | None) -> ObservedStep:
    """Return a cell's median step on its nodes: emulated ones, or those of its ranks' hosts."""
    assert cell.medians is not None
    assert cell.batch_size is not None
    nodes = cell.nodes
    rate_bits = parse_rate(cell.rate) if isinstance(cell.rate, str) else cell.rate
    if rate_bits is None:
        rows = cell.runs[0].ranks
        nodes = len({row.host if row.node is None else row.node for row in rows})
    return ObservedStep(
        where=cell.id,
        nodes=nodes,
        ranks_per_node=cell.ranks // nodes,
        strategy=cell.sync,
        global_batch=round(cell.batch_size),
        step_seconds=cell.medians.step,
        rate_bits=rate_bits,
        model=model,
    )


def _sets(measurement: _Measurement) -> list[MeasuredSet]:
    """Return a set for each model, rate, number of ranks on a node, and batch."""
    # One rank has no link, and the page draws one size of buckets: "ddp-9" is no strategy.
    drawn = [step for step in measurement.steps if step.nodes > 1 and step.strategy in STRATEGIES]
    sets = []
    for same in grouped((_placement(step), step) for step in drawn).values():
        for (scaling, batch_size), alike in _by_batch(same).items():
            sets.append(_observed_set(measurement, alike, scaling, batch_size))
    return sets


def _placement(step: ObservedStep) -> tuple[object, ...]:
    return step.model, step.rate_bits, step.ranks_per_node


def _by_batch(steps: Sequence[ObservedStep]) -> dict[tuple[str, int], list[ObservedStep]]:
    """Return the steps by scaling and batch: weak if the batch of a rank is always the same."""
    of_a_rank = {step.global_batch / (step.nodes * step.ranks_per_node) for step in steps}
    if len(of_a_rank) == 1 and len({step.nodes for step in steps}) > 1:
        return {("weak", round(of_a_rank.pop())): list(steps)}
    return grouped((("strong", step.global_batch), step) for step in steps)


def _observed_set(
    measurement: _Measurement, steps: Sequence[ObservedStep], scaling: str, batch_size: int
) -> MeasuredSet:
    first = steps[0]
    points = [MeasuredPoint(step.strategy, step.nodes, step.step_seconds) for step in steps]
    state = {
        "ranks_per_node": first.ranks_per_node,
        "scaling": scaling,
        "batch_size": batch_size,
        **_shown(points),
    }
    about = [measurement.about]
    rate_gbit = None if first.rate_bits is None else first.rate_bits / 1e9
    if first.model is not None:
        state |= {"model": first.model, "gradient_type": "fp32"}
    if measurement.backend is not None:
        cluster = TypicalCluster.of(measurement.backend, "tcp")
        state |= _links(cluster, rate_gbit)
        about += _assumed(cluster, rate_gbit)
    elif rate_gbit is not None:
        state["rate_gbit"] = rate_gbit
    if measurement.own is not None:
        seconds, samples = measurement.own
        state |= {**_TYPICAL, "step_ms": round(1e3 * seconds, 6), "batch": round(samples)}
    title = f"{measurement.name}: {count(first.ranks_per_node, 'rank')} a node, batch {batch_size}"
    if rate_gbit is not None:
        title += f", {rate_gbit:g} Gbit/s"
    family = measurement.backend or ""
    return MeasuredSet("", title, " ".join(filter(None, about)), family, state, points)
