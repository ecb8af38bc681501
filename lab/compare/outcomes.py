"""Read what a run left in its folder: its times, its failure, the machine that it was on.

``read_run`` returns the repeat of a finished run, ``failed_run`` that of a failed one.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from common.profiling.records import EpochReport, StepRecord
from common.reporting.run_files import RanksFile
from common.utils.atomic_files import read_regular
from common.utils.typed_json import Facts, calm
from lab.compare.cells import Run
from lab.comparison.record import Repeat
from lab.comparison.run_files import (
    MACHINE_FACTS,
    Machine,
    RunConfig,
    Summary,
    read_known,
    read_run_file,
    read_run_lines,
)
from lab.fleet.first_failure import find_root_failure

_MOST_LOG_BYTES = 2**20


def read_repeat(folder: Path, *, seed: int, emulated: bool = False) -> Repeat:
    """Return what a finished run left in ``folder``. UserError if it is not whole.

    emulated : whether the compute was: such ranks need no core of their own.
    """
    summary = read_run_file(folder / "summary.json", Summary)
    ranks = read_run_file(folder / "ranks.json", RanksFile)
    steps = read_run_lines(folder / "metrics.jsonl", StepRecord)
    machine: Facts = {}
    if (folder / "environment.json").exists():
        _, machine = read_known(folder / "environment.json", Machine)
    config = folder / "config.json"
    started = None
    precision = None
    if config.exists():
        # Rank 0 writes config.json before the first step.
        written = datetime.fromtimestamp(config.stat().st_mtime)
        started = written.isoformat(timespec="seconds")
        recorded, _ = read_known(config, RunConfig)
        precision = recorded.precision
    if precision and machine.get("gpus"):
        precision = f"{precision} on a GPU"
    computes_on_cores = not emulated and not machine.get("gpus")
    return Repeat(
        folder=str(folder),
        seed=seed,
        status="done",
        started=started,
        ranks=ranks.ranks,
        timed_steps=ranks.steps,
        losses=[_loss(step) for step in steps],
        step_seconds=[(step.step, seconds) for step in steps if (seconds := _whole(step))],
        test_accuracy=summary.test_accuracy,
        test_loss=summary.test_loss,
        precision=precision,
        mean_iteration_seconds=summary.mean_iteration_seconds,
        load_per_core=summary.load_per_core,
        equal_weights=summary.ranks_hold_equal_weights,
        machine={name: machine.get(name) for name in MACHINE_FACTS},
        claim=ranks.claim,
        crowded=computes_on_cores and _share_cores(ranks, machine),
    )


def _loss(step: StepRecord) -> tuple[int, float | None]:
    """Return a step and its loss, which is None with emulated compute."""
    if math.isnan(step.loss):
        return step.step, None
    return step.step, step.loss


def _whole(step: StepRecord) -> float:
    """Return the seconds of a whole step; of its sections in records that have no more."""
    return step.step_seconds or math.fsum(step.seconds.values())


def _share_cores(ranks: RanksFile, machine: Facts) -> bool:
    """Return whether a host had more ranks than cores; one of unknown cores had enough."""
    hosts = Counter(rank.host for rank in ranks.ranks)
    cores = machine.get("usable_cores") or len(ranks.ranks)
    return max(hosts.values()) > cores


def read_run(run: Run) -> Repeat:
    """Return what a run of a comparison left, as a repeat. UserError if it has not finished."""
    repeat = read_repeat(run.path, seed=run.seed, emulated=run.settings.emulated)
    repeat.repeat = run.repeat
    repeat.folder = str(run.path.relative_to(run.folder))
    if run.settings.until_accuracy is not None:
        reached = time_to_accuracy(run.path, run.settings.until_accuracy)
        if reached is not None:
            repeat.seconds_to_accuracy, repeat.steps_to_accuracy = reached
    return repeat


def failed_run(run: Run, message: str) -> Repeat:
    """Return the repeat of a run that failed with this message."""
    return Repeat(
        repeat=run.repeat,
        folder=str(run.path.relative_to(run.folder)),
        seed=run.seed,
        status="failed",
        message=calm(message),
        ranks=[],
    )


def time_to_accuracy(path: Path, accuracy: float) -> tuple[float, int] | None:
    """Return training time and steps until the end of the first epoch that reached ``accuracy``.

    Evaluations do not count. None: no epoch reached it.
    """
    config, _ = read_known(path / "config.json", RunConfig)
    seconds = 0.0
    for epoch in read_run_lines(path / "epochs.jsonl", EpochReport):
        seconds += epoch.seconds
        if epoch.val_accuracy >= accuracy:
            return seconds, epoch.epoch * config.steps_per_epoch
    return None


def describe_times(run: Repeat) -> str:
    """Return the means over the ranks of a finished run, for a person."""
    step = statistics.fmean(rank.seconds.step for rank in run.ranks)
    sync = statistics.fmean(rank.seconds.sync for rank in run.ranks)
    return f"{step:.3f} s per step, exposed communication {sync:.3f} s"


def describe_failure(statuses: Mapping[int, int], logs: Mapping[int, Path]) -> str | None:
    """Return which rank failed first and its error message; None if none failed.

    statuses : of the failed ranks, in the order in which they ended. logs : the file of each rank's
    output, of which the last 1 MiB is searched. Raises UserError if it is no regular file.
    """
    if not statuses:
        return None
    texts = {}
    for rank in statuses:
        texts[rank] = ""
        if logs[rank].exists():
            output = read_regular(logs[rank], last_bytes=_MOST_LOG_BYTES)
            texts[rank] = output.decode(errors="replace")
    culprit, message = find_root_failure(list(statuses), statuses, texts, name="rank")
    return f"{message} (its output: {logs[culprit]})"
