"""Read what a run left in its folder: its times, its failure, the machine that it was on.

``read_run`` returns the repeat of a finished run, ``failed_run`` that of a failed one.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from common.errors import UserError, file_errors
from common.profiling.records import EpochReport, StepRecord
from common.reporting.run_files import RanksFile, StepTime
from common.utils.atomic_files import read_regular
from common.utils.typed_json import (
    Count,
    Facts,
    Finite,
    Name,
    Ranks,
    Seed,
    Share,
    Step,
    Text,
    calm,
    check_facts,
    convert,
    read_json,
    read_lines,
)
from lab.compare.cells import Run
from lab.processes.first_failure import find_root_failure

# The facts of ``environment.json`` that must agree for times to be comparable.
MACHINE_FACTS = ("cpu", "gpus", "torch", "usable_cores")
_MOST_LOG_BYTES = 2**20
_NOT_REACHED = {"seconds_to_accuracy": None, "steps_to_accuracy": None}


class Summary(Struct, kw_only=True):
    """The entries of ``summary.json`` that are read again; a run writes more (summary.py)."""

    test_accuracy: Share | None = None
    ranks_hold_equal_weights: bool = True
    mean_iteration_seconds: StepTime | None = None
    load_per_core: Finite | None = None


class RunConfig(TypedDict):
    """The entries of ``config.json`` with which a reader computes; a run writes all its settings.

    ``TRAINING_FACTS`` names those that must agree.
    """

    world_size: Ranks
    sync: Name
    batch_size: Step
    seed: Seed
    bucket_mb: NotRequired[Annotated[float, Meta(gt=0, le=1e9)] | Literal["auto"] | None]
    dataset: NotRequired[Text | None]
    precision: NotRequired[Name]
    steps_per_epoch: NotRequired[Count]
    untimed_steps: NotRequired[Count | None]


# The settings in ``config.json`` that must agree for two runs to be comparable.
TRAINING_FACTS = (
    *("dataset", "training_images", "model", "batch_size", "seed", "learning_rate", "schedule"),
    *("warmup_steps", "warmup_epochs", "milestones", "step_factor", "scale_lr", "total_steps"),
    *("opt", "momentum", "nesterov", "weight_decay", "label_smoothing", "clip_norm"),
    *("accumulation_steps", "amp", "amp_dtype", "sync_batchnorm", "pretrained_weights"),
    *("unfreeze", "input_size", "normalise", "flip", "cutout", "tta", "untimed_steps"),
)


class MachineFacts(TypedDict, total=False):
    """The entries of ``environment.json`` with which a reader computes; it has many more."""

    usable_cores: Ranks | None
    git_commit: Text | None


def read_run_file(path: Path, schema: Any, *, read: Callable[[Path, Any], Any] = read_json) -> Any:
    """Return a JSON file of a run. UserError if it is missing or does not fit its schema."""
    try:
        with file_errors(f"{path} cannot be read"):
            return read(path, schema)
    except UserError as error:
        raise UserError(
            f"{error}: the run has not finished, or its folder was not copied completely"
        ) from error


def read_facts(path: Path, schema: Any) -> dict[str, Any]:
    """Return the plain values in a ``config.json`` or ``environment.json``; for ``read_run_file``.

    UserError if those that ``schema`` names do not fit it.
    """
    facts = read_json(path, Facts)
    convert(facts, schema, name=str(path))
    check_facts(facts, name=str(path))
    return facts


def read_repeat(folder: Path, *, seed: int, emulated: bool = False) -> dict[str, Any]:
    """Return what a finished run left in ``folder``, as a repeat. UserError if it is not whole.

    emulated : whether the compute was: such ranks need no core of their own.
    """
    summary = read_run_file(folder / "summary.json", Summary)
    ranks = read_run_file(folder / "ranks.json", RanksFile)
    steps = read_run_file(folder / "metrics.jsonl", StepRecord, read=read_lines)
    config, environment = folder / "config.json", folder / "environment.json"
    machine = (
        read_run_file(environment, MachineFacts, read=read_facts) if environment.exists() else {}
    )
    recorded = read_run_file(config, RunConfig, read=read_facts) if config.exists() else {}
    precision = recorded.get("precision")
    hosts = [rank["host"] for rank in ranks.ranks]
    cores = machine.get("usable_cores") or len(hosts)
    computes = not emulated and not machine.get("gpus")
    # Rank 0 writes config.json before the first step.
    started = datetime.fromtimestamp(config.stat().st_mtime) if config.exists() else None
    return {
        "folder": str(folder),
        "seed": seed,
        "status": "done",
        "started": started and started.isoformat(timespec="seconds"),
        "ranks": ranks.ranks,
        "timed_steps": ranks.steps,
        "losses": [[line.step, None if math.isnan(line.loss) else line.loss] for line in steps],
        "test_accuracy": summary.test_accuracy,
        "precision": f"{precision} on a GPU" if precision and machine.get("gpus") else precision,
        "mean_iteration_seconds": summary.mean_iteration_seconds,
        "load_per_core": summary.load_per_core,
        **_NOT_REACHED,
        "equal_weights": summary.ranks_hold_equal_weights,
        "machine": {name: machine.get(name) for name in MACHINE_FACTS},
        "crowded": computes and max(map(hosts.count, hosts)) > cores,
    }


def read_run(run: Run) -> dict[str, Any]:
    """Return what a run of a comparison left, as a repeat. UserError if it has not finished."""
    outcome = read_repeat(run.path, seed=run.seed, emulated=run.settings.emulated)
    if run.settings.until_accuracy is not None:
        outcome |= time_to_accuracy(run.path, run.settings.until_accuracy)
    return outcome | {"repeat": run.repeat, "folder": str(run.path.relative_to(run.folder))}


def failed_run(run: Run, message: str) -> dict[str, Any]:
    """Return the repeat of a run that failed with this message."""
    return {
        "repeat": run.repeat,
        "folder": str(run.path.relative_to(run.folder)),
        "seed": run.seed,
        "status": "failed",
        "message": calm(message),
        "ranks": [],
        "losses": [],
        "test_accuracy": None,
        **_NOT_REACHED,
    }


def time_to_accuracy(path: Path, accuracy: float) -> dict[str, float | int | None]:
    """Return training time and steps until the end of the first epoch that reached ``accuracy``.

    Evaluations do not count.
    """
    config = read_run_file(path / "config.json", RunConfig, read=read_facts)
    epochs = read_run_file(path / "epochs.jsonl", EpochReport, read=read_lines)
    for epoch, seconds in zip(epochs, accumulate(one.seconds for one in epochs), strict=True):
        if epoch.val_accuracy >= accuracy:
            return {
                "seconds_to_accuracy": seconds,
                "steps_to_accuracy": epoch.epoch * config.get("steps_per_epoch", 0),
            }
    return dict(_NOT_REACHED)


def describe_times(outcome: Mapping[str, Any]) -> str:
    """Return the means over the ranks of a finished run, for a person."""
    step, sync = (
        statistics.fmean(rank["seconds"][name] for rank in outcome["ranks"])
        for name in ("step", "sync")
    )
    return f"{step:.3f} s per step, exposed communication {sync:.3f} s"


def describe_failure(statuses: Mapping[int, int], logs: Mapping[int, Path]) -> str | None:
    """Return which rank failed first and its error message; None if none failed.

    statuses : of the failed ranks, in the order in which they ended. logs : the file of each rank's
    output, of which the last 1 MiB is searched. Raises UserError if it is no regular file.
    """
    texts = {
        rank: read_regular(logs[rank], last_bytes=_MOST_LOG_BYTES).decode(errors="replace")
        if logs[rank].exists()
        else ""
        for rank in statuses
    }
    if not texts:
        return None
    culprit, message = find_root_failure(list(statuses), statuses, texts, name="rank")
    return f"{message} (its output: {logs[culprit]})"
