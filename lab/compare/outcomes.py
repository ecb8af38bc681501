"""Read what a run left in its folder: its times, its failure, the machine that it was on.

``read_run`` returns the repeat of a finished run, ``failed_run`` that of a failed one.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.processes import find_root_failure
from lab.compare.cells import Run

MACHINE_FACTS = ("cpu", "gpus", "torch", "usable_cores")
"""The facts of ``environment.json`` that must agree for times to be comparable."""
_NOT_REACHED = {"seconds_to_accuracy": None, "steps_to_accuracy": None}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a run. UserError if it is missing or cut."""
    return _parsed(path, json.loads)


def _read_lines(path: Path) -> list[Any]:
    """Return a file's whole lines; a run that is writing may not have finished the last one."""
    return _parsed(
        path, lambda text: [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    )


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): the run has not finished, or its folder was not "
            "copied completely"
        ) from error


def read_repeat(folder: Path, *, seed: int) -> dict[str, Any]:
    """Return what a finished run left in ``folder``, as a repeat. UserError if it is not whole."""
    summary, ranks = read_json(folder / "summary.json"), read_json(folder / "ranks.json")
    return {
        "folder": str(folder),
        "seed": seed,
        "status": "done",
        "ranks": ranks["ranks"],
        "losses": [
            [entry["step"], entry["loss"]] for entry in _read_lines(folder / "metrics.jsonl")
        ],
        "test_accuracy": summary["test_accuracy"],
        **_NOT_REACHED,
        "equal_weights": summary["ranks_hold_equal_weights"],
    }


def read_run(run: Run) -> dict[str, Any]:
    """Return what a run of a comparison left, as a repeat. UserError if it has not finished."""
    outcome = read_repeat(run.path, seed=run.seed)
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
        "message": message,
        "ranks": [],
        "losses": [],
        "test_accuracy": None,
        **_NOT_REACHED,
    }


def time_to_accuracy(path: Path, accuracy: float) -> dict[str, float | int | None]:
    """Return training time and steps until the end of the first epoch that reached ``accuracy``.

    Evaluations do not count.
    """
    seconds = 0.0
    steps_per_epoch = read_json(path / "config.json")["steps_per_epoch"]
    for epoch in _read_lines(path / "epochs.jsonl"):
        seconds += epoch["seconds"]
        if epoch["val_accuracy"] is not None and epoch["val_accuracy"] >= accuracy:
            return {
                "seconds_to_accuracy": seconds,
                "steps_to_accuracy": epoch["epoch"] * steps_per_epoch,
            }
    return dict(_NOT_REACHED)


def describe_times(outcome: Mapping[str, Any]) -> str:
    """Return the means over the ranks of a finished run, for a person."""
    step, sync = (
        statistics.fmean(rank["seconds"][name] for rank in outcome["ranks"])
        for name in ("step", "sync")
    )
    return f"{step:.3f} s per step, exposed communication {sync:.3f} s"


def describe_failure(statuses: Mapping[int, int], logs: Mapping[int, Path]) -> str:
    """Return which rank failed first and its error message.

    statuses : of the failed ranks, in the order in which they ended. logs : the file of each rank's
    output.
    """
    texts = {
        rank: logs[rank].read_text(encoding="utf-8", errors="replace")
        if logs[rank].exists()
        else ""
        for rank in statuses
    }
    culprit, message = find_root_failure(list(statuses), statuses, texts, name="rank")
    return f"{message} (its output: {logs[culprit]})"


def ranks_share_cores(
    ranks: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], *, emulated: bool
) -> bool:
    """Return whether a machine without GPUs computed for more ranks than it has cores."""
    hosts = [rank["host"] for rank in ranks]
    cores = machine.get("usable_cores", len(hosts))
    return not emulated and not machine.get("gpus") and max(map(hosts.count, hosts)) > cores
