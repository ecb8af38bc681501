"""A run as a repeat of a comparison: its times, its failure, the machine that it was on.

``read_outcome`` returns the repeat of a finished run, ``failed_run`` that of a failed one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.profiling.records import EpochReport, StepRecord
from common.runs import FinishedRun, mean_seconds, read_epochs, read_run, read_steps
from common.utils.atomic_files import read_regular
from common.utils.typed_json import calm
from lab.compare.cells import Run
from lab.comparison.record import Repeat
from lab.explain.diagnosis import first_to_fail

# The facts of ``environment.json`` that must agree for times to be comparable.
MACHINE_FACTS = ("cpu", "gpus", "torch", "usable_cores")

_MOST_LOG_BYTES = 2**20


def repeat_of(run: FinishedRun, *, emulated: bool = False) -> Repeat:
    """Return a finished run as a repeat. UserError if its records of steps cannot be read.

    emulated : whether the compute was: such ranks need no core of their own.
    """
    steps = read_steps(run.folder)
    machine = run.environment
    precision = run.config.precision
    if precision and machine.get("gpus"):
        precision = f"{precision} on a GPU"
    computes_on_cores = not emulated and not machine.get("gpus")
    return Repeat(
        folder=str(run.folder),
        seed=run.config.seed,
        status="done",
        started=run.started.isoformat(timespec="seconds"),
        ranks=run.ranks.ranks,
        timed_steps=run.ranks.steps,
        losses=[_loss(step) for step in steps],
        step_seconds=[(step.step, seconds) for step in steps if (seconds := _whole(step))],
        test_accuracy=run.summary.test_accuracy,
        test_loss=run.summary.test_loss,
        train_accuracy=_last_accuracy(steps),
        precision=precision,
        mean_iteration_seconds=run.summary.mean_iteration_seconds,
        load_per_core=run.summary.load_per_core,
        equal_weights=run.summary.ranks_hold_equal_weights,
        machine={name: machine.get(name) for name in MACHINE_FACTS},
        claim=run.ranks.claim,
        crowded=computes_on_cores and _share_cores(run),
    )


def _loss(step: StepRecord) -> tuple[int, float | None]:
    """Return a step and its loss, which is None with emulated compute."""
    if math.isnan(step.loss):
        return step.step, None
    return step.step, step.loss


def _last_accuracy(steps: Sequence[StepRecord]) -> float | None:
    """Return the accuracy of the last step that has one, which emulated compute never does."""
    known = [step.accuracy for step in steps if not math.isnan(step.accuracy)]
    return known[-1] if known else None


def _whole(step: StepRecord) -> float:
    """Return the seconds of a whole step; of its sections in records that have no more."""
    return step.step_seconds or math.fsum(step.seconds.values())


def _share_cores(run: FinishedRun) -> bool:
    """Return whether a host had more ranks than cores; one of unknown cores had enough."""
    hosts = Counter(rank.host for rank in run.ranks.ranks)
    cores = run.machine.usable_cores or len(run.ranks.ranks)
    return max(hosts.values()) > cores


def read_outcome(run: Run) -> Repeat:
    """Return what a run of a comparison left, as a repeat. UserError if it has not finished."""
    finished = read_run(run.path)
    repeat = repeat_of(finished, emulated=run.settings.emulated)
    repeat.repeat = run.repeat
    repeat.folder = str(run.path.relative_to(run.folder))
    if run.settings.until_accuracy is not None:
        reached = time_to_accuracy(
            read_epochs(run.path),
            run.settings.until_accuracy,
            steps_per_epoch=finished.config.steps_per_epoch,
        )
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


def time_to_accuracy(
    epochs: Sequence[EpochReport], accuracy: float, *, steps_per_epoch: int
) -> tuple[float, int] | None:
    """Return training time and steps until the end of the first epoch that reached ``accuracy``.

    Evaluations do not count. None: no epoch reached it.
    """
    seconds = 0.0
    for epoch in epochs:
        seconds += epoch.seconds
        if epoch.val_accuracy >= accuracy:
            return seconds, epoch.epoch * steps_per_epoch
    return None


def describe_times(run: Repeat) -> str:
    """Return the means over the ranks of a finished run, for a person."""
    means = mean_seconds(run.ranks)
    return f"{means.step:.3f} s per step, exposed communication {means.sync:.3f} s"


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
    culprit, message, _ = first_to_fail(statuses, texts, name="rank")
    return f"{message} (its output: {logs[culprit]})"
