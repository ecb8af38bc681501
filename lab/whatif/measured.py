"""Measured steps for the page of ``lab whatif``. Imports no torch.

``published_sets`` has what others published, each set with the state of the page in which it was
measured. ``files_of`` checks the reader's own reports, tables and runs, and returns what the page
reads of them: files.js makes sets of them as of files that are dropped onto the page.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.say import count, duration_text, rate_text
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from common.utils.paths import REPOSITORY
from common.utils.typed_json import encode
from lab.comparison.record import Comparison, as_json, read_comparison
from lab.predict.common_models import common_models
from lab.predict.observed import read_observed
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import PublishedStep, published_path, read_published
from lab.predict.scenario import Scenario
from lab.whatif.data import State

_SHIPPED = REPOSITORY / "reports/samples/compare-digits-1gbit"
_UNKNOWN_BITS = 10e9  # of a link whose rate is not stated, unless software passes more
_AS_IN_MODELS = "_cifar10"  # common models that are models of this project
_SHARED = "global batch kept"  # in the note of rows whose ranks share one batch
_OF_A_RUN = ("summary.json", "ranks.json", "config.json")
_OF_A_COMPARISON = ("format", "kind", "emulated", "settings", "groups", "cells")


@dataclass(frozen=True)
class MeasuredPoint:
    """The measured step of a strategy on a number of nodes; ``note`` as published."""

    strategy: str
    nodes: int
    seconds: float
    note: str


@dataclass(frozen=True)
class MeasuredSet:
    """Steps that differ in strategy and number of nodes alone.

    about : sentences. family : "gloo" or "nccl". state : of the page.
    """

    id: str
    title: str
    about: str
    family: str
    state: State
    points: Sequence[MeasuredPoint]


@dataclass(frozen=True)
class MeasuredFile:
    """A file of measurements as the page reads it: its path from the folder that holds it."""

    path: str
    text: str


def published_sets() -> list[MeasuredSet]:
    """Return a set for each published setting, in the file's order."""
    rows = read_published(published_path())
    sets = []
    numbers: Counter[str] = Counter()
    for same in grouped((_setting(row), row) for row in rows).values():
        group = same[0].group
        numbers[group] += 1
        name = group if numbers[group] == 1 else f"{group}-{numbers[group]}"
        sets.append(_published_set(name, same))
    return sets


def _setting(row: PublishedStep) -> tuple[object, ...]:
    """Return what rows have in common which differ in strategy and number of nodes alone."""
    return (
        *(row.group, row.model, row.software, row.transport, row.rate_gbit, row.grad_megabytes),
        *(row.ranks_per_node, row.one_rank_batch, row.one_rank_step_s, _scaling(row)),
    )


def _scaling(row: PublishedStep) -> str:
    """Return whether the ranks shared the batch of one rank alone, or had such a batch each."""
    is_shared = row.batch_per_rank * row.ranks == row.one_rank_batch
    if is_shared and _SHARED in row.columns["note"]:
        return "strong"
    return "weak"


def _title(rows: Sequence[PublishedStep]) -> str:
    """Return what was measured, with what a reader knows first and the group's name last."""
    row = rows[0]
    nodes = ", ".join(str(number) for number in sorted({each.nodes for each in rows}))
    ranks = "" if row.ranks_per_node == 1 else f" of {row.ranks_per_node} ranks"
    rate = "" if row.rate_gbit is None else f" at {row.rate_gbit:g} Gbit/s"
    samples = count(round(row.one_rank_batch), "sample")
    owner = "in all" if _scaling(row) == "strong" else "a rank"
    return (
        f"{row.model}: {nodes} nodes{ranks}, {row.transport}{rate}, {row.software}, "
        f"{row.grad_megabytes:g} MB, {samples} {owner}, "
        f"{duration_text(row.one_rank_step_s)} alone ({row.group})"
    )


def _published_set(name: str, rows: Sequence[PublishedStep]) -> MeasuredSet:
    first = rows[0]
    scenario = first.cell(Beliefs.of(load_priors())).scenario
    points = []
    for row in rows:
        note = row.columns["note"]
        points.append(MeasuredPoint(row.strategy, row.nodes, row.measured_step_s, note))
    strategies = sorted({point.strategy for point in points}, key=list(STRATEGIES).index)
    model, gradient_type = _model(first, scenario)
    # Where no rate was stated, the software is the limit.
    rate_bits = scenario.rate_bits or max(_UNKNOWN_BITS, scenario.enough_bits)
    state = State(
        model=model,
        parameters=round(1e6 * first.grad_megabytes / 4),
        gradient_type=gradient_type,
        backend=first.backend,
        transport="rdma" if first.by_rdma else "tcp",
        rate_gbit=rate_bits / 1e9,
        step_ms=round(1e3 * first.one_rank_step_s, 6),
        batch=round(first.one_rank_batch),
        scaling=_scaling(first),
        batch_size=round(first.one_rank_batch),
        ranks_per_node=first.ranks_per_node,
        nodes=max(point.nodes for point in points),
        strategies=strategies,
        focus=strategies[-1],
    )
    about = " ".join(_sentences(first, scenario))
    return MeasuredSet(name, _title(rows), about, first.backend, state, points)


def _model(row: PublishedStep, scenario: Scenario) -> tuple[str, str]:
    """Return the model as the page names it, and the type of its gradients."""
    model = common_models().get(scenario.calibration.model)
    if model is None:
        return "own", "fp32"
    # Between 2 and 4 bytes a parameter, in the middle of their logarithms.
    in_half = 1e6 * row.grad_megabytes < 8**0.5 * model.parameters
    return model.name.removesuffix(_AS_IN_MODELS), "fp16" if in_half else "fp32"


def _sentences(row: PublishedStep, scenario: Scenario) -> list[str]:
    """Return where a row was measured, and what the page does not know or takes otherwise."""
    facts = [row.columns[name] for name in ("hardware", "source")]
    sentences = [f"{'; '.join(facts)}."]
    if row.rate_gbit is None:
        sentences.append(
            "The rate of the links is not stated. The page takes one above what the software "
            f"passes ({rate_text(scenario.software_bits)}), so the software is the limit."
        )
    if scenario.node_step_seconds is not None:
        sentences.append(
            "One node with all its ranks took "
            f"{duration_text(scenario.node_step_seconds)} a step. The page takes a typical loss "
            "instead; lab predict --node-step-time takes the number."
        )
    return sentences


def shipped_files() -> list[MeasuredFile]:
    """Return the comparison that comes with a checkout; an installed package has none."""
    return files_of([_SHIPPED]) if _SHIPPED.is_dir() else []


def files_of(paths: Sequence[Path]) -> list[MeasuredFile]:
    """Return what the page reads of the reader's own measurements.

    paths : folders or ``results.json`` of ``lab compare`` and ``lab report``, tables (``.csv``) as
    for ``lab predict --fit``, and folders of runs. Raises UserError if one cannot be read.
    """
    files: list[MeasuredFile] = []
    for path in paths:
        files += _files_of(path)
    return files


def _files_of(path: Path) -> list[MeasuredFile]:
    results = path / "results.json" if path.is_dir() else path
    if results.suffix == ".json" and results.is_file():
        return [comparison_file(read_comparison(results), results.resolve().parent.name)]
    try:
        steps = read_observed([path])
    except UserError as error:
        raise UserError(str(error).replace("--fit:", "--runs:")) from error
    if path.is_file():
        return [MeasuredFile(path.name, path.read_text(encoding="utf-8-sig"))]
    files = []
    for step in steps:
        for name in _OF_A_RUN:
            part = Path(step.where).resolve() / name
            files.append(MeasuredFile("/".join(part.parts[-3:]), part.read_text(encoding="utf-8")))
    return files


def comparison_file(comparison: Comparison, name: str) -> MeasuredFile:
    """Return the ``results.json`` of a comparison, whose folder is called ``name``.

    Of each cell it has the medians, and of its first run which host each rank was on.
    """
    entries = as_json(comparison)
    kept = {key: entries[key] for key in _OF_A_COMPARISON if key in entries}
    for cell, entry in zip(comparison.cells, entries["cells"], strict=True):
        hosts = []
        for run in cell.runs[:1]:
            hosts += [{"host": row.host, "node": row.node} for row in run.ranks]
        entry["repeats"] = [{"status": "done", "ranks": hosts}]
    return MeasuredFile(f"{name}/results.json", encode(kept).decode())
