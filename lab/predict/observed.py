"""A reader's own measured steps, for ``lab predict --fit``. Imports no torch.

``read_observed`` reads tables and folders of runs, ``fit_to`` moves the priors of a scenario's
cluster to where they explain these steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.runs import read_run
from common.say import count, duration_text
from common.sync import STRATEGIES, strategy_options
from common.utils.grouping import grouped
from common.utils.registry import choices_text
from lab.predict.event_model import LARGEST_NODES
from lab.predict.fitting import MeasuredStep, fit
from lab.predict.priors import HIGH_Z, Beliefs, Prior
from lab.predict.scenario import Scenario
from lab.predict.step_tables import StepRow, read_rows
from lab.predict.tables import message_plans
from lab.units import parse_rate

_COLUMNS = ("nodes", "strategy", "global_batch", "step_seconds")
_SHORTEST = 0.9  # of computing alone: measurements scatter
_ALIKE = 1.5  # two measurements of one cell differ by no more than this
_EXPLAINED = 1.5  # measured over fitted step, and the inverse, that a fit may leave
_MOVED = 0.25  # z from which a prior's move is told


@dataclass(frozen=True)
class ObservedStep:
    """A measured step.

    where : the row or folder it comes from. global_batch : samples of all ranks. rate_bits : of a
    node's link; None: that of the prediction. model : that was trained; None: that of the
    prediction. settings : of a run, as its config.json has them; None: those of the prediction.
    sync_seconds : exposed communication of a run. backend : "gloo" or "nccl", of a run.
    """

    where: str
    nodes: int
    ranks_per_node: int
    strategy: str
    global_batch: int
    step_seconds: float
    rate_bits: float | None = None
    model: str | None = None
    settings: Mapping[str, Any] | None = None
    sync_seconds: float | None = None
    backend: str | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def setting(self) -> tuple[object, ...]:
        """What two measurements of one thing have in common."""
        return (
            *(self.nodes, self.ranks_per_node, self.strategy, self.global_batch),
            *(self.rate_bits, repr(self.settings and _sent_settings(self.settings))),
        )


def _sent_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that change what a step sends."""
    names = [*strategy_options(), "accumulation_steps", "sync_batchnorm"]
    return {name: settings.get(name) for name in names}


def read_observed(paths: Sequence[Path], *, flag: str = "--fit") -> list[ObservedStep]:
    """Return the steps of tables (``.csv``) and of folders of runs, in order.

    flag : for which they are read. Raises UserError if one cannot be read, or if two contradict
    each other.
    """
    try:
        steps = []
        for path in paths:
            steps += _steps_in(path)
        _check_alike(steps)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error
    return steps


def _steps_in(path: Path) -> list[ObservedStep]:
    if path.is_dir():
        return [_of_run(folder) for folder in _runs_in(path)]
    return [_of_row(row) for row in read_rows(path, _COLUMNS)]


def _check_alike(steps: Sequence[ObservedStep]) -> None:
    """Raise UserError if two measurements of one setting are far apart."""
    for same in grouped((step.setting, step) for step in steps).values():
        shortest = min(same, key=lambda step: step.step_seconds)
        longest = max(same, key=lambda step: step.step_seconds)
        if longest.step_seconds > _ALIKE * shortest.step_seconds:
            raise UserError(
                f"{shortest.where} and {longest.where} are the same run, and took "
                f"{duration_text(shortest.step_seconds)} and "
                f"{duration_text(longest.step_seconds)}: leave out the one that is wrong"
            )


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder of a run, or the finished runs in reports/<part>-<sync>."""
    if (folder / "summary.json").exists():
        return [folder]
    runs = sorted(summary.parent for summary in folder.glob("*/summary.json"))
    if not runs:
        raise UserError(
            f"{folder} has no finished run: give the folder that rank 0 wrote, "
            "reports/<part>-<sync>/<time>, or the one that holds it"
        )
    return runs


def _of_row(row: StepRow) -> ObservedStep:
    rate = row.text("rate")
    if rate.replace(".", "", 1).isdigit():
        rate += "gbit"
    return ObservedStep(
        where=row.where,
        nodes=row.whole("nodes"),
        ranks_per_node=row.whole("ranks_per_node") if row.text("ranks_per_node") else 1,
        strategy=row.strategy(),
        global_batch=row.whole("global_batch"),
        step_seconds=row.number("step_seconds"),
        rate_bits=parse_rate(rate, f"{row.where}: rate") if rate else None,
    )


def _of_run(folder: Path) -> ObservedStep:
    """Return the step of a run of this project: the mean over ranks of each one's median step."""
    run = read_run(folder)
    config = run.config
    if config.sync not in STRATEGIES:
        raise UserError(
            f"{folder}: sync: got {config.sync!r}, {choices_text(config.sync, STRATEGIES)}"
        )
    if run.summary.step_seconds is None:
        raise UserError(f"{folder} has no timed step: train more steps")
    on_nodes = run.ranks.ranks_of_nodes()
    if len(set(on_nodes.values())) > 1:
        raise UserError(
            f"{folder}: its nodes have {', '.join(map(str, on_nodes.values()))} ranks: give a run "
            "with as many ranks on each node"
        )
    return ObservedStep(
        where=str(folder),
        nodes=len(on_nodes),
        ranks_per_node=len(run.ranks.ranks) // len(on_nodes),
        strategy=config.sync,
        global_batch=config.batch_size,
        step_seconds=run.summary.step_seconds,
        model=config.model,
        settings=run.settings,
        sync_seconds=(run.summary.section_seconds or {}).get("sync"),
        backend="nccl" if config.backend == "nccl" else "gloo",
    )


@dataclass(frozen=True)
class FittedCell:
    """What was measured, and its prediction before and after the fit, in seconds.

    about : what it is, for a reader. facts : for a program.
    """

    about: str
    facts: Mapping[str, Any]
    measured: float
    before: float
    after: float


@dataclass(frozen=True)
class ClusterFit:
    """What measurements said: the beliefs, each measured time, and the priors that moved.

    about : what was measured. moved : each prior as it was, and as it became.
    """

    about: str
    beliefs: Beliefs
    cells: Sequence[FittedCell]
    moved: Sequence[tuple[Prior, Prior]]

    def as_json(self) -> dict[str, Any]:
        """Return measured times and moved priors with names."""
        cells = []
        for cell in self.cells:
            times = {
                "measured_step_s": cell.measured,
                "predicted_before_s": cell.before,
                "predicted_after_s": cell.after,
            }
            cells.append({**cell.facts, **times})
        moved = [
            {
                "prior": before.name,
                "before": before.typical,
                "after": after.typical,
                "low": after.low,
                "high": after.high,
            }
            for before, after in self.moved
        ]
        return {"about": self.about, "steps": cells, "priors": moved}

    def lines(self) -> list[str]:
        """Return what a reader must know of the fit."""
        lines = [f"{self.about}:"]
        for cell in self.cells:
            lines.append(
                f"  {cell.about}: measured {duration_text(cell.measured)}, predicted "
                f"{duration_text(cell.before)} before and {duration_text(cell.after)} after the fit"
            )
        for before, after in self.moved:
            lines.append(
                f"  {before.meaning}: {_digits(before.typical)} -> {_digits(after.typical)} "
                f"(80 %: {_digits(after.low)} to {_digits(after.high)})"
            )
        if not self.moved:
            lines.append("  no prior moved noticeably")
        return lines


def fit_to(
    steps: Sequence[ObservedStep], scenario: Scenario, options: Mapping[str, Any]
) -> ClusterFit:
    """Return what these steps say about the cluster of ``scenario``, on which they were measured.

    options : of the strategies in tables; runs have their own.

    Raises UserError if a step contradicts the scenario, or if no such cluster explains it.
    """
    assert scenario.cluster is not None
    named = []
    for step in steps:
        text = f"{step.strategy} on {count(step.nodes, 'node')}"
        named.append((text, _facts(step), _cell(step, scenario, options)))
    about = f"fitted to {count(len(steps), 'measured step')}"
    before = scenario.cluster.beliefs
    found = fit_cells(about, named, before, start=before)
    for step, cell in zip(steps, found.cells, strict=True):
        off = cell.measured / cell.after
        if max(off, 1 / off) > _EXPLAINED:
            raise UserError(
                f"--fit: {step.where}: no {scenario.cluster.name} explains this step of "
                f"{duration_text(cell.measured)} together with --step-time, --rate and the "
                f"other steps: {duration_text(cell.before)} is typical, and the best fit takes "
                f"{duration_text(cell.after)}. Check them"
            )
    return found


def _facts(step: ObservedStep) -> dict[str, Any]:
    return {
        "from": step.where,
        "nodes": step.nodes,
        "ranks_per_node": step.ranks_per_node,
        "sync": step.strategy,
        "global_batch": step.global_batch,
        "rate_bits": step.rate_bits,
    }


def fit_cells(
    about: str,
    steps: Sequence[tuple[str, Mapping[str, Any], MeasuredStep]],
    before: Beliefs,
    *,
    start: Beliefs,
) -> ClusterFit:
    """Return what measured steps say, each with its words and facts (``FittedCell``).

    before : what was believed. start : the same with what is known already.
    """
    cells = [cell for _, _, cell in steps]
    after = fit(start, cells) if cells else start
    fitted = []
    for text, facts, cell in steps:
        was = np.exp(cell.log_steps(before, before.mean[:, None]))
        became = np.exp(cell.log_steps(after, after.mean[:, None]))
        seconds = cell.measured_seconds
        fitted.append(FittedCell(text, facts, seconds, was.item(), became.item()))
    return ClusterFit(about, after, fitted, _moved(before, after))


def _cell(step: ObservedStep, asked: Scenario, options: Mapping[str, Any]) -> MeasuredStep:
    """Return the step in a scenario of its own."""
    _check(step, asked)
    accumulation_steps = asked.accumulation_steps
    sync_batchnorm = asked.sync_batchnorm
    if step.settings is not None:
        options = step.settings
        accumulation_steps = step.settings.get("accumulation_steps") or 1
        sync_batchnorm = step.settings.get("sync_batchnorm", "off") != "off"
    scenario = replace(
        asked,
        scaling="strong",
        batch_size=step.global_batch,
        ranks_per_node=step.ranks_per_node,
        rate_bits=step.rate_bits or asked.rate_bits,
        accumulation_steps=accumulation_steps,
        sync_batchnorm=sync_batchnorm,
    )
    ranks = step.ranks
    if ranks * scenario.least_samples > step.global_batch:
        raise UserError(
            f"--fit: {step.where}: a global batch of {step.global_batch:,} has too few samples for "
            f"{count(ranks, 'rank')}: check the row"
        )
    compute = scenario.compute_at(step.nodes)
    alone = (compute.alone or compute).seconds
    if step.step_seconds < _SHORTEST * alone:
        raise UserError(
            f"--fit: {step.where}: a step took {duration_text(step.step_seconds)}, but "
            f"{count(ranks, 'rank')} compute for {duration_text(alone)} at a global batch of "
            f"{step.global_batch:,}: check --step-time, --batch, and the row"
        )
    options = {**options, **scenario.plan_options}
    plan = message_plans([step.strategy], options)[step.strategy]
    return MeasuredStep(scenario, plan, step.nodes, step.step_seconds)


def _check(step: ObservedStep, asked: Scenario) -> None:
    """Raise UserError if a step says nothing about the links of ``asked``."""
    if step.nodes == 1:
        known = "--step-time" if step.ranks_per_node == 1 else "--node-step-time"
        raise UserError(
            f"--fit: {step.where}: it ran on one node, which says nothing about links: leave it "
            f"out, and give its step as {known}"
        )
    if step.nodes > LARGEST_NODES:
        raise UserError(
            f"--fit: {step.where}: nodes: got {step.nodes:,}, give 2 to {LARGEST_NODES:,}"
        )
    if step.strategy == "none":
        raise UserError(
            f"--fit: {step.where}: none sends nothing, so it says nothing about links: leave it out"
        )
    if step.model not in (None, asked.calibration.model):
        raise UserError(
            f"--fit: {step.where}: it trained {step.model}, and the prediction is of "
            f"{asked.calibration.model}: give runs of one model, and --model"
        )


def _moved(before: Beliefs, after: Beliefs) -> list[tuple[Prior, Prior]]:
    """Return the priors that moved noticeably, the farthest first, before and after."""
    was = {prior.name: prior for prior in before.priors}
    spreads = HIGH_Z * np.sqrt(np.sum(after.root**2, axis=1))
    moved = []
    for index in np.argsort(-np.abs(after.mean)):
        prior = after.priors[index]
        mean = after.mean[index]
        if abs(mean) < _MOVED and prior is was[prior.name]:
            continue
        ends = prior.at(mean + spreads[index] * np.array([-1.0, 0.0, 1.0]))
        low, typical, high = np.minimum(ends, prior.most).tolist()
        moved.append((was[prior.name], replace(prior, low=low, typical=typical, high=high)))
    return moved


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
