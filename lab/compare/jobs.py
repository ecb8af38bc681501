"""A comparison as a plan of numbered runs that other programs start, such as a scheduler.

``plan_comparison`` writes a ``results.json`` whose cells are all pending, and ``describe_plan``
tells a person how to start the runs. A launcher calls ``run_cell`` on each node of a run: it leaves
a finished run alone, refuses one that another job holds, checks nodes and code, and runs the part
as a child process. Each rank logs to ``logs/<cell>-<repeat>/rank<r>.txt``, and after a failure
notes its exit status in ``rank<r>.failed.json`` there. No run writes ``results.json``:
``merge_results`` does, from what the runs have left, at any moment.
"""

import fcntl
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

from msgspec import Meta

from common.config.schema import flag
from common.config.schema import settings as config_settings
from common.distributed.launch_env import LaunchSpec
from common.distributed.spawn import run_local_ranks
from common.errors import GroupError, UserError, count, file_errors
from common.utils.atomic_files import refuse_links, regular_target, write_atomically
from common.utils.grouping import grouped
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.processes import on_signals, shell_status
from common.utils.source_hash import code_differences, code_facts
from common.utils.typed_json import encode, shown
from lab.compare.cells import Run, choose_buckets, in_turns, node_command, plan_cells
from lab.compare.outcomes import (
    MachineFacts,
    describe_failure,
    describe_times,
    failed_run,
    read_facts,
    read_run,
    read_run_file,
)
from lab.compare.results import differences, distinct, gather, read_results, write_results
from lab.compare.runner import open_comparison, prepare
from lab.compare.settings import Settings
from lab.flags import refuse
from lab.predict.calibration_file import calibration_path

RUN_BY = (
    "PartOne/main.py",
    "PartTwo/main.py",
    "PartThree/main.py",
    "lab/compare/cells.py",
    "lab/compare/settings.py",
)
_ELSEWHERE = ("compute", "log_wandb")  # a file of this machine, a service with this user's account
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOCK_SECONDS = 1.0  # a report takes the lock for a moment
_OTHERS_SECONDS = 2.0
_NO_SCRIPT = (
    "an installed copy has no job script. Plan in a checkout of the project, which has "
    "launch/slurm-compare.sbatch, or start the runs by hand"
)
_Status = Annotated[int, Meta(ge=-255, le=255)]

# --- the plan ---


def plan_comparison(
    settings: Settings, *, reports: Path, anew: bool, command: str, predicts: bool
) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of a planned comparison.

    It is the newest unfinished one with the same settings and code, or a new one.

    predicts : predict from this machine's calibration, if there is one and no run has begun.
    Raises UserError if the settings ask for emulated links, or have flags that no plan may have.
    """
    _check_flags(settings, name="the flags after --")
    if any(settings.rates):
        raise UserError(
            "--plan runs on real nodes, whose links cannot be set, and --rate "
            f"{' '.join(map(str, settings.rates))} needs emulated nodes: leave out one of the two"
        )
    folder, results = open_comparison(
        settings, reports=reports, anew=anew, command=command, code=code_facts(*RUN_BY)
    )
    begun = any((folder / name).exists() for name in ("logs", "runs"))
    can_predict = not begun and calibration_path().exists()
    prepare(settings, folder, results, None, predicts=predicts and can_predict)
    return folder, results


def _check_flags(settings: Settings, *, name: str) -> None:
    """Raise UserError unless the flags are settings of the training, equal on all ranks.

    A plan may come from somebody else. It must not choose the files that a run reads and writes on
    this machine, or the hosts that it contacts.
    """
    allowed: set[str] = set()
    for setting_name, known in config_settings().items():
        is_shared = not known.per_rank or setting_name in ("threads", "debug")
        if known.in_recipe and is_shared and setting_name not in _ELSEWHERE:
            allowed |= {flag(setting_name), *known.flags}
    for word in settings.flags:
        long = re.sub("^--no-", "--", word.partition("=")[0].replace("_", "-"))
        if word.startswith("-") and long not in allowed:
            raise UserError(
                f"{name}: got {shown(word)}, but a plan may only have flags of the training that "
                "are equal on all nodes, such as --amp or --threads 2: leave it out"
            )


def planned_runs(folder: Path, results: dict[str, Any]) -> list[Run]:
    """Return all runs of a plan, by number. UserError unless these are the results of a plan.

    The settings alone say what a run does; the cells in the file may come from somebody else.
    """
    if "plan" not in results:
        raise UserError(
            f"{folder} is a comparison that lab compare runs itself, not a plan: give a folder "
            "that lab compare --plan made"
        )
    file = folder / "results.json"
    settings = Settings.from_json(results["settings"], name=f"{file}: settings")
    _check_flags(settings, name=f"{file}: settings: flags")
    cells = plan_cells(settings)
    choose_buckets({"cells": cells, "prediction": results["prediction"]})
    return in_turns(folder, settings, cells)


def planned_run(folder: Path, number: int) -> tuple[Run, dict[str, str]]:
    """Return run ``number`` of the plan in ``folder`` and its code. UserError if there is none."""
    if not (folder / "results.json").exists():
        raise UserError(
            f"{folder} is no plan on {os.uname().nodename} (it has no results.json): make one with "
            "lab compare --plan, on a file system that all nodes share (--output-dir DIR)"
        )
    results = read_results(folder / "results.json")
    runs = planned_runs(folder, results)
    if not 0 <= number < len(runs):
        raise UserError(f"--run: got {number}, the plan in {folder} has runs 0 to {len(runs) - 1}")
    return runs[number], results["plan"]["code"]


def describe_plan(folder: Path, results: dict[str, Any]) -> list[str]:
    """Return lines that say how to start the missing runs of these merged results."""
    runs = planned_runs(folder, results)
    to_do = [runs[number] for number in results["plan"]["to_do"]]
    numbers = grouped((run.nodes, run.number) for run in to_do)
    places = [f"on {count(nodes, 'node')}: {spans(numbers[nodes])}" for nodes in sorted(numbers)]
    lines = [
        f"{len(to_do)} of {len(runs)} runs to do in {folder}{': ' * bool(to_do)}"
        + "; ".join(places),
        f"predicted from {calibration_path()}"
        if results["prediction"]
        else "no prediction: run lab calibrate on such nodes before the first run to have one",
    ]
    if to_do:
        lines += [
            f"with Slurm:   {how_to_run(to_do) if IN_CHECKOUT else _NO_SCRIPT}",
            f"by hand:      {_by_hand(folder)}   # on each node of run K",
        ]
    return [*lines, f"at any time:  lab report {folder}"]


def how_to_run(runs: Sequence[Run]) -> str:
    """Return the command that runs these one after the other: with Slurm, or by hand.

    An installed copy of the project has no script for Slurm.
    """
    folder, numbers = runs[0].folder.resolve(), spans([run.number for run in runs])
    if not IN_CHECKOUT:
        return f"{_by_hand(folder)} with K = {numbers}"
    script, nodes = REPOSITORY / "launch/slurm-compare.sbatch", max(run.nodes for run in runs)
    paths = [str(path).removeprefix(f"{Path.cwd()}/") for path in (script, folder)]
    return shlex.join(["sbatch", f"--nodes={nodes}", f"--array={numbers}%1", *paths])


def _by_hand(folder: Path) -> str:
    """Return the command that starts run K on each of its nodes."""
    return f"lab run-cell {shlex.quote(str(folder))} --run K --master-ip IP --num-nodes N --rank R"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, e.g. "0-3,5"."""
    ranges = grouped((number - index, number) for index, number in enumerate(numbers)).values()
    return ",".join("-".join(map(str, sorted({one[0], one[-1]}))) for one in ranges)


# --- one run, on each of its nodes ---


def run_cell(folder: Path, number: int, launch: LaunchSpec) -> int:
    """Run this node's part of run ``number`` of the plan in ``folder``; return the exit status.

    launch : rank and number of nodes; if the cell has fewer nodes, the last ones have nothing to
    do. Raises UserError if another job holds the run. Rank 0 also raises UserError if the run
    cannot start as it is and GroupError if it failed; the other ranks' logs hold their reasons.
    """
    run, code = planned_run(folder, number)
    if launch.rank >= run.nodes:
        return 0
    output, note = rank_files(run, launch.rank)
    refuse_links(folder, (run.path, output, note))
    with file_errors(f"{output} cannot be written", ": allow writing there on each node"):
        output.parent.mkdir(parents=True, exist_ok=True)
        log = regular_target(output).open("ab")
    with log:
        if not _within(_LOCK_SECONDS, lambda: _lock(log, fcntl.LOCK_EX)):
            raise UserError(
                f"this run is already running: another job holds {output}; wait until it ends"
            )
        regular_target(note).unlink(missing_ok=True)
        failure, status, done = None, 0, _state(run)[0] == "done"
        if not done:
            log.truncate(0)
            try:
                _check(run, code, launch)
                status = _run_part(run, launch, log)
            except (UserError, GroupError) as error:
                failure, status = error, 2 if isinstance(error, UserError) else 1
                log.write(f"error: {error}\n".encode())
        if status:
            write_atomically(note, encode(status))
    if launch.rank > 0:
        return min(status, 2)
    if status and not failure:
        # Another rank may have failed first and be about to note it.
        notes = [rank_files(run, rank)[1] for rank in range(run.nodes)]
        _within(_OTHERS_SECONDS, lambda: all(note.exists() for note in notes))
        failure = GroupError(f"{name_of(run)}: {_why_failed(run)}")
    if failure:
        raise failure
    words = " is already done; nothing to do" if done else f": {describe_times(read_run(run))}"
    print(f"{name_of(run)}{words}", flush=True)
    return 0


def name_of(run: Run) -> str:
    """Return a planned run's number and title, for a person."""
    return f"run {run.number} ({run.title})"


def rank_files(run: Run, rank: int) -> tuple[Path, Path]:
    """Return the file of a rank's output, and that of its exit status, written if it fails."""
    return run.logs / f"rank{rank}.txt", run.logs / f"rank{rank}.failed.json"


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Return whether ``holds`` returns True within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def _lock(file: IO[bytes], kind: int) -> bool:
    """Lock an open file (LOCK_EX or LOCK_SH); return False if another process holds the lock.

    A run's part inherits the lock on its log. True on a file system without locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _check(run: Run, code: Mapping[str, str], launch: LaunchSpec) -> None:
    """Raise UserError if there are too few nodes, or this node's code differs from the plan's."""
    name, nodes = name_of(run), run.nodes
    other = code_differences(code_facts(*RUN_BY), code)
    problems = {
        f"{name} needs {nodes} nodes, and there {'is' if launch.world_size == 1 else 'are'} "
        f"{launch.world_size}: start it on at least {nodes}, e.g. with sbatch --nodes={nodes}": (
            launch.world_size < nodes
        ),
        f"{name} has {nodes} nodes: give --master-ip, --num-nodes and --rank on each": (
            nodes > 1 and launch.master_ip is None
        ),
        f"{os.uname().nodename} has other code than the plan ({other}), so its times would not be "
        "comparable: restore that code, or make a new plan with lab compare --plan": bool(other),
    }
    refuse(problems)


def _run_part(run: Run, launch: LaunchSpec, log: IO[bytes]) -> int:
    """Run the part; return its exit status, as a shell reports it.

    Raises GroupError if a signal stopped it: what it did until then is no measurement.
    """
    group: list[object] = [
        *("--master-ip", launch.master_ip, "--master-port", launch.master_port),
        *("--num-nodes", run.nodes, "--rank", launch.rank),
    ]
    command = [sys.executable, *node_command(run), *map(str, group if run.nodes > 1 else [])]
    with file_errors(f"{run.path} of an earlier attempt cannot be removed", ": remove it"):
        if launch.rank == 0 and run.path.exists():  # the others wait for rank 0
            shutil.rmtree(run.path)
    with on_signals(_SIGNALS, _stop):
        exits = run_local_ranks([command], outputs=[log])
    return shell_status(exits.statuses[0])


def _stop(number: int, _frame: FrameType | None) -> None:
    raise GroupError(
        f"stopped by {signal.Signals(number).name}, as at a time limit or after the loss of a "
        "node; the same command starts the run from the beginning"
    )


def _why_failed(run: Run) -> str | None:
    """Return which rank failed first and its error message; None if no rank noted a failure."""
    files = {rank: rank_files(run, rank) for rank in range(run.nodes)}
    notes = {rank: note for rank, (_, note) in files.items() if note.is_file()}
    in_order = sorted(notes, key=lambda rank: notes[rank].stat().st_mtime_ns)
    statuses = {rank: read_run_file(notes[rank], _Status) for rank in in_order}
    return describe_failure(statuses, {rank: output for rank, (output, _) in files.items()})


# --- all runs ---


def merge_results(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Return ``results`` with the outcomes that runs have left in ``folder``, and write them.

    Runs on different kinds of machines form different groups. If the folder of all runs is gone
    (cleaned up, or not copied), the results stay as they are.
    """
    runs = planned_runs(folder, results)
    if not (folder / "runs").exists() and any(cell["median"] for cell in results["cells"]):
        return results
    states = [(run, *_state(run)) for run in runs]
    by_word = grouped((word, run) for run, word, _ in states)
    done = by_word.get("done", [])
    kinds = [outcome["machine"] for _, word, outcome in states if word == "done"]
    machines = sorted(distinct(kinds), key=kinds.count, reverse=True)
    cells, timelines = gather(
        folder,
        [(run.cell, outcome, outcome.get("machine")) for run, _, outcome in states],
        machines,
        repeats=len(runs[0].settings.seeds_to_run),
    )
    if done and (path := done[0].path / "environment.json").exists():
        results["environment"] = read_run_file(path, MachineFacts, read=read_facts)
    to_do = [run for run, word, _ in states if word in ("missing", "failed")]
    unequal = [run.number for run, _, outcome in states if not outcome.get("equal_weights", True)]
    calibrated = ((results["prediction"] or {}).get("calibration") or {}).get("cpu")
    cpu = results["environment"].get("cpu")
    rest = [f"; {word}: {_by_cell(some)}" for word, some in by_word.items() if word != "done"]
    warnings = {
        "the runs were on different kinds of machines. To compare all runs, remove from runs/ the "
        "folders of those on other kinds and start them again on one kind (with Slurm: sbatch "
        "--constraint or --nodelist)": len(machines) > 1,
        f"the ranks ended with different weights in runs {spans(unequal)}": bool(unequal),
        f"the prediction is for {calibrated}, but the runs were on {cpu}": (
            bool(done) and calibrated not in (None, cpu)
        ),
        f"{len(done)} of {len(runs)} runs are done{''.join(rest)}": bool(rest),
        **{
            f"failed: {name_of(run)}: {outcome['message']}": True
            for run, word, outcome in states
            if word == "failed"
        },
        "to run them, unless they are already queued: " + how_to_run(to_do or runs): bool(to_do),
    }
    results |= {
        "cells": cells,
        "timelines": timelines,
        "finished": len(done) == len(runs),
        "differences": differences(
            kinds, [run.number for run in done], lambda numbers: f"runs {spans(numbers)}"
        ),
        "groups": {str(group): kind for group, kind in enumerate(machines) if len(machines) > 1},
        "warnings": [sentence for sentence, applies in warnings.items() if applies],
        "plan": results["plan"] | {"to_do": [run.number for run in to_do]},
    }
    write_results(folder / "results.json", results)
    return results


def _state(run: Run) -> tuple[str, dict[str, Any]]:
    """Return "done", "failed", "running" or "missing", and the repeat of an ended run."""
    with suppress(UserError):
        return "done", read_run(run)
    log, _ = rank_files(run, 0)
    with suppress(FileNotFoundError), regular_target(log).open("rb") as file:
        if not _lock(file, fcntl.LOCK_SH):
            return "running", {}
    why = _why_failed(run)
    if why is None and next(run.logs.glob("rank*.txt"), None) is None:
        return "missing", {}
    return "failed", failed_run(
        run,
        why
        or "the run did not report its end: it was killed, its node was lost, or it still runs and "
        f"the file system has no locks (its output: {log})",
    )


def _by_cell(runs: Sequence[Run]) -> str:
    return ", ".join(
        f"{cell} (run{'s' if len(numbers) > 1 else ''} {spans(numbers)})"
        for cell, numbers in grouped((run.cell["id"], run.number) for run in runs).items()
    )
