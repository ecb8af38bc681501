"""A comparison as a plan of numbered runs that other programs start, such as a scheduler.

``plan_comparison`` writes a ``results.json`` whose cells are all pending, and ``describe_plan``
tells a person how to start the runs. A launcher calls ``run_cell`` on each node of a run: it leaves
a finished run alone, refuses one that another job holds, checks nodes and code, and runs the part
as a child process. Each rank logs to ``logs/<cell>-<repeat>/rank<r>.txt``, and after a failure
notes its exit status in ``rank<r>.failed.json`` there. No run writes ``results.json``:
``merge_results`` does, from what the runs have left, at any moment.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Literal

from msgspec import UNSET, Meta

from common.config.schema import flag
from common.config.schema import settings as config_settings
from common.distributed.launch_env import LaunchSpec
from common.distributed.spawn import run_local_ranks
from common.errors import GroupError, UserError, file_errors
from common.runs import read_run, read_run_file
from common.say import count, listed, spans
from common.utils.atomic_files import refuse_links, regular_target, write_atomically
from common.utils.file_lock import lock_open_file
from common.utils.grouping import grouped
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.processes import on_signals, shell_status
from common.utils.source_hash import code_differences, code_facts
from common.utils.typed_json import encode, shown
from lab.compare.cells import Run, choose_buckets, in_turns, node_command, plan_cells
from lab.compare.outcomes import describe_failure, describe_times, failed_run, read_outcome
from lab.compare.runner import open_comparison, prepare
from lab.compare.settings import Settings
from lab.comparison.cell import CellRun, fill
from lab.comparison.record import (
    Comparison,
    Plan,
    Repeat,
    read_comparison,
    write_comparison,
)
from lab.predict.calibration_file import calibration_path

RUN_BY = (
    "PartOne/main.py",
    "PartTwo/main.py",
    "PartThree/main.py",
    "lab/compare/cells.py",
    "lab/compare/settings.py",
    "lab/comparison/cell.py",
)
_FOR_A_RANK = ("threads", "debug")  # what a plan may set of each rank's own settings
_ELSEWHERE = ("compute", "log_wandb")  # a file of this machine, a service with this user's account
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOCK_SECONDS = 1.0  # a report takes the lock for a moment
_OTHERS_SECONDS = 2.0  # until the other ranks of a failed run have noted their exit statuses
_NO_SCRIPT = (
    "an installed copy has no job script. Plan in a checkout of the project, which has "
    "launch/slurm-compare.sbatch, or start the runs by hand"
)
_Status = Annotated[int, Meta(ge=-255, le=255)]


@dataclass(frozen=True)
class RunState:
    """How far a planned run is; its repeat, if it has ended."""

    run: Run
    word: Literal["done", "failed", "running", "missing"]
    repeat: Repeat | None = None


# --- the plan ---


def plan_comparison(
    settings: Settings, *, reports: Path, anew: bool, command: str, predicts: bool
) -> tuple[Path, Comparison]:
    """Return a planned comparison and its folder.

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
    folder, comparison = open_comparison(
        settings, reports=reports, anew=anew, command=command, code=code_facts(*RUN_BY)
    )
    begun = any((folder / name).exists() for name in ("logs", "runs"))
    can_predict = not begun and calibration_path().exists()
    prepare(settings, folder, comparison, None, predicts=predicts and can_predict)
    return folder, comparison


def _check_flags(settings: Settings, *, name: str) -> None:
    """Raise UserError unless the flags are settings of the training, equal on all ranks.

    A plan may come from somebody else. It must not choose the files that a run reads and writes on
    this machine, or the hosts that it contacts.
    """
    allowed = _flags_of_the_training()
    for word in settings.flags:
        long = re.sub("^--no-", "--", word.partition("=")[0].replace("_", "-"))
        if word.startswith("-") and long not in allowed:
            raise UserError(
                f"{name}: got {shown(word)}, but a plan may only have flags of the training that "
                "are equal on all nodes, such as --amp or --threads 2: leave it out"
            )


def _flags_of_the_training() -> set[str]:
    """Return the flags that a plan may have: of the training, alike on all nodes, without files."""
    allowed: set[str] = set()
    for name, known in config_settings().items():
        is_shared = not known.per_rank or name in _FOR_A_RANK
        if known.in_recipe and is_shared and name not in _ELSEWHERE:
            allowed |= {flag(name), *known.flags}
    return allowed


def plan_of(folder: Path, comparison: Comparison) -> Plan:
    """Return what the nodes of a plan must agree on. UserError if it is not a plan."""
    if comparison.plan is UNSET:
        raise UserError(
            f"{folder} is a comparison that lab compare runs itself, not a plan: give a folder "
            "that lab compare --plan made"
        )
    return comparison.plan


def planned_runs(folder: Path, comparison: Comparison) -> list[Run]:
    """Return all runs of a plan, by number. UserError unless this comparison is a plan.

    The settings alone say what a run does; the cells in the file may come from somebody else.
    """
    plan_of(folder, comparison)
    file = folder / "results.json"
    settings = Settings.from_json(comparison.settings, name=f"{file}: settings")
    _check_flags(settings, name=f"{file}: settings: flags")
    cells = plan_cells(settings)
    choose_buckets(cells, comparison.prediction)
    return in_turns(folder, settings, cells)


def planned_run(folder: Path, number: int) -> tuple[Run, dict[str, str]]:
    """Return run ``number`` of the plan in ``folder`` and its code. UserError if there is none."""
    if not (folder / "results.json").exists():
        raise UserError(
            f"{folder} is no plan on {os.uname().nodename} (it has no results.json): make one with "
            "lab compare --plan, on a file system that all nodes share (--output-dir DIR)"
        )
    comparison = read_comparison(folder / "results.json")
    runs = planned_runs(folder, comparison)
    if not 0 <= number < len(runs):
        raise UserError(f"--run: got {number}, the plan in {folder} has runs 0 to {len(runs) - 1}")
    return runs[number], plan_of(folder, comparison).code


def describe_plan(folder: Path, comparison: Comparison) -> list[str]:
    """Return lines that say how to start the missing runs of this merged comparison."""
    runs = planned_runs(folder, comparison)
    missing = plan_of(folder, comparison).to_do
    assert missing is not UNSET  # merge_results comes first
    to_do = [runs[number] for number in missing]
    summary = f"{len(to_do)} of {len(runs)} runs to do in {folder}"
    if to_do:
        numbers = grouped((run.nodes, run.number) for run in to_do)
        places = [
            f"on {count(nodes, 'node')}: {','.join(spans(numbers[nodes]))}"
            for nodes in sorted(numbers)
        ]
        summary += f": {'; '.join(places)}"
    lines = [summary]
    if comparison.prediction is None:
        lines.append(
            "no prediction: run lab calibrate on such nodes before the first run to have one"
        )
    else:
        lines.append(f"predicted from {calibration_path()}")
    if to_do:
        lines += [
            f"with Slurm:   {how_to_run(to_do) if IN_CHECKOUT else _NO_SCRIPT}",
            f"by hand:      {_by_hand(folder)}   # on each node of run K",
        ]
    lines.append(f"at any time:  {shlex.join(['lab', 'report', str(folder)])}")
    return lines


def how_to_run(runs: Sequence[Run]) -> str:
    """Return the command that runs these one after the other: with Slurm, or by hand.

    An installed copy of the project has no script for Slurm.
    """
    folder = runs[0].folder.resolve()
    numbers = ",".join(spans([run.number for run in runs]))
    if not IN_CHECKOUT:
        return f"{_by_hand(folder)} with K = {numbers}"
    nodes = max(run.nodes for run in runs)
    script = REPOSITORY / "launch/slurm-compare.sbatch"
    paths = [str(path).removeprefix(f"{Path.cwd()}/") for path in (script, folder)]
    return shlex.join(["sbatch", f"--nodes={nodes}", f"--array={numbers}%1", *paths])


def _by_hand(folder: Path) -> str:
    """Return the command that starts run K on each of its nodes."""
    return f"lab run-cell {shlex.quote(str(folder))} --run K --master-ip IP --num-nodes N --rank R"


# --- one run, on each of its nodes ---


def run_cell(folder: Path, number: int, launch: LaunchSpec) -> int:
    """Run this node's part of run ``number`` of the plan in ``folder``; return the exit status.

    launch : rank and number of nodes; if the cell has fewer nodes, the last ones have nothing to
    do. Raises UserError if another job holds the run. Rank 0 also raises UserError if the run
    cannot start as it is and GroupError if it failed; the other ranks' logs hold their reasons, and
    they return 1 or 2.

    The lock on the rank's log marks the run as running. It is released when this process and the
    part that it started have ended, however they end.
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
        if not _within(_LOCK_SECONDS, lambda: _lock(log)):
            raise UserError(
                f"this run is already running: another job holds {output}; wait until it ends"
            )
        regular_target(note).unlink(missing_ok=True)  # of an earlier attempt
        done = _state(run).word == "done"
        status = 0
        failure = None
        if not done:
            log.truncate(0)  # the run begins anew, whatever an earlier attempt did
            status, failure = _try_part(run, code, launch, log)
        if status:
            write_atomically(note, encode(status))
    if launch.rank > 0:
        return min(shell_status(status), 2)
    if failure is not None:
        raise failure
    if status:
        # Another rank may have failed first and be about to note it.
        notes = [rank_files(run, rank)[1] for rank in range(run.nodes)]
        _within(_OTHERS_SECONDS, lambda: all(note.exists() for note in notes))
        raise GroupError(f"{name_of(run)}: {_why_failed(run)}")
    if done:
        print(f"{name_of(run)} is already done; nothing to do", flush=True)
    else:
        print(f"{name_of(run)}: {describe_times(read_outcome(run))}", flush=True)
    return 0


def _try_part(
    run: Run, code: Mapping[str, str], launch: LaunchSpec, log: IO[bytes]
) -> tuple[int, UserError | GroupError | None]:
    """Run the part; return its exit status, and the error if it could not run to its end.

    The error is also in the log.
    """
    try:
        _check(run, code, launch)
        return _run_part(run, launch, log), None
    except (UserError, GroupError) as error:
        log.write(f"error: {error}\n".encode())
        return 2 if isinstance(error, UserError) else 1, error


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


def _lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock the log of a rank; return False if another process holds the lock.

    A run's part inherits the lock on its log. True on a file system without locks.
    """
    try:
        return lock_open_file(file, shared=shared)
    except OSError:
        return True


def _check(run: Run, code: Mapping[str, str], launch: LaunchSpec) -> None:
    """Raise UserError if there are too few nodes, or this node's code differs from the plan's."""
    name = name_of(run)
    if launch.world_size < run.nodes:
        there_are = "there is" if launch.world_size == 1 else "there are"
        raise UserError(
            f"{name} needs {run.nodes} nodes, and {there_are} {launch.world_size}: start it on at "
            f"least {run.nodes}, e.g. with sbatch --nodes={run.nodes}"
        )
    if run.nodes > 1 and launch.master_ip is None:
        raise UserError(
            f"{name} has {run.nodes} nodes: give --master-ip, --num-nodes and --rank on each"
        )
    other = code_differences(code_facts(*RUN_BY), code)
    if other:
        raise UserError(
            f"{os.uname().nodename} has other code than the plan ({other}), so its times would not "
            "be comparable: restore that code, or make a new plan with lab compare --plan"
        )


def _run_part(run: Run, launch: LaunchSpec, log: IO[bytes]) -> int:
    """Run the part; return its exit status, negative for a signal.

    Raises GroupError if a signal stopped it: what it did until then is no measurement.
    """
    command = [sys.executable, *node_command(run)]
    if run.nodes > 1:
        command += [
            *("--master-ip", str(launch.master_ip), "--master-port", str(launch.master_port)),
            *("--num-nodes", str(run.nodes), "--rank", str(launch.rank)),
        ]
    with file_errors(f"{run.path} of an earlier attempt cannot be removed", ": remove it"):
        if launch.rank == 0 and run.path.exists():  # the others wait for rank 0
            shutil.rmtree(run.path)
    with on_signals(_SIGNALS, _stop):
        exits = run_local_ranks([command], outputs=[log])
    return exits.statuses[0]


def _stop(number: int, _frame: FrameType | None) -> None:
    raise GroupError(
        f"stopped by {signal.Signals(number).name}, as at a time limit or after the loss of a "
        "node; the same command starts the run from the beginning"
    )


def _why_failed(run: Run) -> str | None:
    """Return which rank failed first and its error message; None if no rank noted a failure."""
    notes = {}
    outputs = {}
    for rank in range(run.nodes):
        outputs[rank], note = rank_files(run, rank)
        if note.is_file():
            notes[rank] = note
    in_order = sorted(notes, key=lambda rank: notes[rank].stat().st_mtime_ns)
    statuses = {rank: read_run_file(notes[rank], _Status) for rank in in_order}
    return describe_failure(statuses, outputs)


# --- all runs ---


def merge_results(folder: Path, comparison: Comparison) -> Comparison:
    """Add the outcomes that runs have left in ``folder``; write and return the comparison.

    Runs on different kinds of machines form different groups. If the folder of all runs is gone
    (cleaned up, or not copied), the comparison stays as it is.
    """
    plan = plan_of(folder, comparison)
    runs = planned_runs(folder, comparison)
    measured = any(cell.medians for cell in comparison.cells)
    if measured and not (folder / "runs").exists():
        return comparison
    states = [_state(run) for run in runs]
    _fill_cells(comparison, folder, states)
    done = [state.run for state in states if state.word == "done"]
    if done:
        comparison.environment = read_run(done[0].path).environment or comparison.environment
    comparison.finished = len(done) == len(runs)
    comparison.warnings = _warnings(comparison, states)
    plan.to_do = [run.number for run in _missing(states)]
    write_comparison(folder / "results.json", comparison)
    return comparison


def _fill_cells(comparison: Comparison, folder: Path, states: Sequence[RunState]) -> None:
    """Put the repeats into cells: one for each kind of machine on which runs of the cell were."""
    runs = []
    for state in states:
        machine = None
        if state.repeat is not None and state.repeat.done:
            machine = state.repeat.machine or {}
        runs.append(CellRun(state.run.cell, state.repeat, machine))
    fill(
        comparison,
        folder,
        runs,
        lambda numbers: f"runs {listed(spans(numbers))}",
        repeats=len(states[0].run.settings.seeds_to_run),
    )


def _missing(states: Sequence[RunState]) -> list[Run]:
    return [state.run for state in states if state.word in ("missing", "failed")]


def _warnings(comparison: Comparison, states: Sequence[RunState]) -> list[str]:
    """Return what a reader of a merged plan must know first."""
    warnings = []
    if len(comparison.groups) > 1:
        warnings.append(
            "the runs were on different kinds of machines. To compare all runs, remove from runs/ "
            "the folders of those on other kinds and start them again on one kind (with Slurm: "
            "sbatch --constraint or --nodelist)"
        )
    repeats = [(state.run, state.repeat) for state in states if state.repeat is not None]
    unequal = [run.number for run, repeat in repeats if not repeat.equal_weights]
    if unequal:
        warnings.append(f"the ranks ended with different weights in runs {listed(spans(unequal))}")
    by_word = grouped((state.word, state.run) for state in states)
    done = by_word.pop("done", [])
    if done and comparison.prediction is not None:
        calibrated = comparison.prediction.calibration.get("cpu")
        cpu = comparison.environment.get("cpu")
        if calibrated not in (None, cpu):
            warnings.append(f"the prediction is for {calibrated}, but the runs were on {cpu}")
    if by_word:
        others = [f"{word}: {_by_cell(runs)}" for word, runs in by_word.items()]
        warnings.append("; ".join([f"{len(done)} of {len(states)} runs are done", *others]))
    for run, repeat in repeats:
        if not repeat.done:
            warnings.append(f"failed: {name_of(run)}: {repeat.message}")
    to_do = _missing(states)
    if to_do:
        warnings.append("to run them, unless they are already queued: " + how_to_run(to_do))
    return warnings


def _state(run: Run) -> RunState:
    """Return how far a planned run is.

    "running": a process holds the lock on rank 0's log. "missing": no rank has begun a log.
    """
    with suppress(UserError):
        return RunState(run, "done", read_outcome(run))
    log, _ = rank_files(run, 0)
    with suppress(FileNotFoundError), regular_target(log).open("rb") as file:
        if not _lock(file, shared=True):
            return RunState(run, "running")
    why = _why_failed(run)
    if why is None and next(run.logs.glob("rank*.txt"), None) is None:
        return RunState(run, "missing")
    if why is None:
        why = (
            "the run did not report its end: it was killed, its node was lost, or it still runs "
            f"and the file system has no locks (its output: {log})"
        )
    return RunState(run, "failed", failed_run(run, why))


def _by_cell(runs: Sequence[Run]) -> str:
    """Return the cells of these runs, each with the numbers of its runs."""
    texts = []
    for cell, numbers in grouped((run.cell.id, run.number) for run in runs).items():
        runs_word = "runs" if len(numbers) > 1 else "run"
        texts.append(f"{cell} ({runs_word} {listed(spans(numbers))})")
    return ", ".join(texts)
