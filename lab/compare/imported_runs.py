"""``lab report``: turn the folders of runs that were started by hand into a comparison's results.

Call ``collect``. Folders without a finished run are left out and named. Runs that trained different
things, or ran on different machines, form different groups. No figure mixes groups, and the report
names their differences first.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common.config.schema import DEFAULT_LEARNING_RATE
from common.emulation.compute_profile import Profile
from common.errors import UserError
from common.reporting.run_lock import lock_holder
from common.runs import (
    FinishedRun,
    RunConfig,
    read_config,
    read_run,
    read_run_file,
    read_steps,
    read_timeline,
)
from common.say import count, listed
from common.sync import STRATEGIES
from common.utils.typed_json import Facts
from lab.compare.outcomes import repeat_of
from lab.comparison.cell import CellRun, fill, new_cell
from lab.comparison.record import Cell, Comparison, Repeat
from lab.predict.bucket_choice import has_buckets

# The settings in ``config.json`` that must agree for two runs to be comparable.
TRAINING_FACTS = (
    *("dataset", "training_images", "model", "batch_size", "seed", "learning_rate", "schedule"),
    *("warmup_steps", "warmup_epochs", "milestones", "step_factor", "scale_lr", "total_steps"),
    *("opt", "momentum", "nesterov", "weight_decay", "label_smoothing", "clip_norm"),
    *("accumulation_steps", "amp", "amp_dtype", "sync_batchnorm", "pretrained_weights"),
    *("unfreeze", "input_size", "normalise", "flip", "cutout", "tta", "untimed_steps"),
)


@dataclass(frozen=True)
class _ImportedRun:
    """What the folder of a run holds.

    name : the end of its folder's path. facts : those that must agree with the facts of other runs.
    """

    name: str
    run: FinishedRun
    repeat: Repeat
    facts: Facts

    @property
    def config(self) -> RunConfig:
        """The settings with which a reader computes."""
        return self.run.config

    @property
    def heading(self) -> str:
        """The run as a reader knows it: ``cs744/mine (all_reduce, 2 ranks)``."""
        cell = _cell_of(self.config)
        return f"{self.name} ({cell.sync}, {count(cell.nodes, 'rank')})"


def collect(folders: Sequence[Path], *, scaling: str) -> Comparison:
    """Return the comparison of these runs; its ``skipped`` names folders without a finished run.

    UserError if a folder is given twice, or none of them has a finished run.
    """
    runs, skipped = _read_all([folder.resolve() for folder in folders], scaling)
    comparison = Comparison(
        kind="report",
        created=datetime.now().isoformat(timespec="seconds"),
        finished=True,
        emulated=any(run.config.compute != "real" for run in runs),
        settings={},
        environment=runs[0].run.environment,
        warnings=_warnings(runs),
        skipped=skipped,
        cells=[],
        timelines={},
    )
    fill(
        comparison,
        Path(),
        [CellRun(_cell_of(run.config), run.repeat, run.facts) for run in runs],
        lambda places: ", ".join(runs[place].heading for place in places),
    )
    for cell in comparison.cells:
        for number, repeat in enumerate(cell.repeats):
            repeat.repeat = number
    comparison.settings = _settings(runs, comparison.cells, scaling)
    return comparison


def _read_all(folders: Sequence[Path], scaling: str) -> tuple[list[_ImportedRun], list[str]]:
    """Return the finished runs of different folders, and why the others are left out."""
    if len(set(folders)) < len(folders):
        raise UserError("the same run was given twice: give each folder once")
    runs = []
    skipped = []
    for folder in folders:
        try:
            runs.append(_read(folder, scaling))
        except UserError as error:
            skipped.append(str(error))
    if not runs:
        raise UserError(_no_run(skipped))
    return runs, skipped


def _settings(runs: Sequence[_ImportedRun], cells: Sequence[Cell], scaling: str) -> Facts:
    """Return what the runs have in common, as a comparison's settings have it."""
    sizes = {run.facts["batch_size"] for run in runs}
    return {
        "dataset": _joined(run.facts["dataset"] for run in runs),
        "model": _joined(run.facts["model"] for run in runs),
        "batch_size": sizes.pop() if len(sizes) == 1 else None,
        "scaling": scaling,
        "steps": _one_or_range([run.repeat.timed_steps for run in runs]),
        "warmup": _one_or_range([run.config.untimed_steps for run in runs]),
        "repeats": _one_or_range([len(cell.repeats) for cell in cells]),
        "seeds": sorted({run.config.seed for run in runs}),
        "nodes": sorted({cell.nodes for cell in cells}),
        "sync": list(dict.fromkeys(cell.sync for cell in cells)),
        "rates": [None],
        "until_accuracy": None,
        "compute": runs[0].facts["compute"],
        "command": shlex.join(["lab", "report", *(run.name for run in runs)]),
    }


def _warnings(runs: Sequence[_ImportedRun]) -> list[str]:
    """Return what a reader of these runs must know first."""
    warnings = []
    if any(run.repeat.crowded for run in runs):
        warnings.append(
            "in some runs more ranks shared a machine than it has cores: their step times are not "
            "those of separate machines"
        )
    if len({run.run.machine.git_commit for run in runs}) > 1:
        warnings.append("the runs were made with different commits of this project")
    unequal = [run.heading for run in runs if not run.repeat.equal_weights]
    if unequal:
        warnings.append(f"the ranks ended with different weights in {', '.join(unequal)}")
    return warnings


def _no_run(reasons: Sequence[str]) -> str:
    """Return why there is nothing to report."""
    if len(reasons) == 1:
        return reasons[0]
    return f"none of these {len(reasons)} is a finished run: {'; '.join(reasons)}"


def _read(folder: Path, scaling: str) -> _ImportedRun:
    """Return a run. UserError if it has not finished, or its files do not fit together."""
    _check_has_finished(folder)
    run = read_run(folder)
    config = run.config
    if len(run.ranks.ranks) != config.world_size:
        raise UserError(
            f"{folder} does not fit together: config.json has world_size {config.world_size}, "
            f"ranks.json {len(run.ranks.ranks)}: copy the run again"
        )
    emulated = config.compute != "real"
    repeat = repeat_of(run, emulated=emulated)
    facts: Facts = {name: run.settings.get(name) for name in TRAINING_FACTS}
    facts |= repeat.machine or {}
    facts["compute"] = config.compute
    if emulated:  # name and date identify a profile
        profile = read_run_file(folder / "profile.json", Profile)
        facts["compute"] = f"{profile.name} of {profile.made}"
    if not facts["learning_rate"]:
        facts["learning_rate"] = DEFAULT_LEARNING_RATE.get(str(facts["opt"]))
    if scaling == "weak":  # an epoch has fewer steps on more nodes
        facts["batch_size"] = config.batch_size / config.world_size
        facts["total_steps"] = None
    read_timeline(folder)  # refuses one that cannot be drawn
    return _ImportedRun("/".join(folder.parts[-2:]), run, repeat, facts)


def _check_has_finished(folder: Path) -> None:
    """Raise UserError, with advice, unless ``folder`` is that of a run that has finished."""
    if (folder / "results.json").exists():
        raise UserError(f"{folder} is a comparison: give only this folder, or only folders of runs")
    if (folder / "summary.json").exists() and (folder / "config.json").exists():
        return
    if (folder / "config.json").exists():
        raise UserError(_unfinished(folder))
    runs = sorted(path.parent for path in folder.glob("*/config.json"))
    found = f". It has these: {', '.join(map(str, runs[-5:]))}" if runs else ""
    raise UserError(
        f"{folder} is not the folder of a run: it has no config.json. Give the folder that "
        f"rank 0 wrote, reports/<part>-<sync>/<time>{found}"
    )


def _unfinished(folder: Path) -> str:
    """Say how far a run without a summary came, and whether it still runs."""
    config, _ = read_config(folder)
    steps = len(read_steps(folder)) if (folder / "metrics.jsonl").exists() else 0
    progress = count(steps, "step")
    if config.total_steps:
        progress = f"{steps} of {count(config.total_steps, 'step')}"
    holder = lock_holder(folder)
    if holder:
        return f"{folder} has not finished: {progress} recorded, and {holder} still runs"
    return (
        f"{folder} has not finished: it ended after {progress}, before its summary. The same "
        "command with --resume auto finishes it, if it has a checkpoint"
    )


def _cell_of(config: RunConfig) -> Cell:
    """Return the cell of a run; one with buckets of another size has another cell."""
    sync = "none" if config.world_size == 1 else config.sync
    size = config.bucket_mb
    if size is not None and sync in STRATEGIES and has_buckets(sync):
        size_text = size if isinstance(size, str) else f"{size:g}"
        sync = f"{sync}-{size_text}"
    return new_cell(sync, config.world_size, batch_size=config.batch_size)


def _joined(values: Iterable[Any]) -> str:
    """Return the different values as a text, in order of appearance."""
    return listed(dict.fromkeys(map(str, values)))


def _one_or_range(numbers: Sequence[int | None]) -> int | str | None:
    """Return the number that all have, ``3 to 5`` if they differ, or None if one is unknown."""
    known = sorted({number for number in numbers if number is not None})
    if None in numbers:
        return None
    if len(known) == 1:
        return known[0]
    return f"{known[0]} to {known[-1]}"
