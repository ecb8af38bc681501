"""Choose and lock the folder that a run writes to, then the checkpoint that it resumes from.

Workers that torchrun restarts find their folder by the name of their agent: torchrun's own process
on each node, which outlives them. All ranks resume from the newest checkpoint on any node.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint import newest_checkpoint, time_of_saving
from common.config.schema import RUN_NAME, Config
from common.distributed.collectives import (
    broadcast_checkpoint,
    gather_objects,
    run_on_all_ranks,
    run_on_rank0,
)
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError
from common.reporting.console import say
from common.reporting.run_folder import RunFolder
from common.reporting.run_lock import is_locked_by, lock_folder
from common.utils.atomic_files import (
    check_folder,
    read_regular,
    regular_target,
    remove_unfinished,
    write_atomically,
)
from common.utils.paths import new_folder
from common.utils.typed_json import shown

_ANOTHER_NAME = "give another --run-name"


@dataclass(frozen=True)
class _Found:
    """The newest checkpoint that a node has: its path ("": none), when it was saved, and its step.

    saved_at : in seconds since 1970.
    """

    path: str = ""
    saved_at: float = -1.0
    step: int = -1


@dataclass(frozen=True)
class Job:
    """A run and its folder on this node.

    resuming : whether the folder holds an earlier part of the same run.
    keeps : whether this rank holds the folder's lock and removes what is left of an earlier part.
        Rank 0 does, and the first rank of each node that does not share rank 0's disk.
    writes : whether this rank writes checkpoints. Rank 0 does; under torchrun with restarts, so
        does the first rank of each node that does not share rank 0's disk.
    """

    folder: RunFolder
    resuming: bool
    keeps: bool
    writes: bool


def open_job(config: Config, launch: LaunchSpec, world: World, locks: ExitStack) -> Job:
    """Choose, create and lock the run's folder, with the same name on every node. Collective.

    ``locks`` releases the lock. A --run-name that exists already, without --resume, gets a number.
    Raises UserError if the folder cannot be written or another process writes there.
    """
    run_on_all_ranks(world, lambda: _check_paths(config, is_rank0=world.is_rank0))
    parent = config.reports_folder / config.experiment_name
    record = _record(parent, launch)
    mine = run_on_all_ranks(world, lambda: _recorded_name(record))
    # Equal on all ranks, since collectives below depend on it.
    name = max(gather_objects(world, mine, schema=str))
    resuming = name != ""
    if not resuming:
        name = run_on_rank0(world, lambda: config.run_name or new_folder(parent).name)
    if not resuming and config.run_name is not None:
        given = run_on_rank0(world, lambda: config.resume or "")
        if given:
            resuming = any(gather_objects(world, _is_run(parent / name), schema=bool))
        else:
            name = _unused_name(parent, name, world)
    folder = run_on_all_ranks(world, lambda: RunFolder(parent / name))
    keeps = _lock(folder.path, world, locks)
    if record is not None and world.local_rank == 0:
        write_atomically(record, name.encode())
    may_start_again = record is not None
    writes = world.is_rank0 or (keeps and may_start_again)
    return Job(folder, resuming, keeps, writes)


def _record(parent: Path, launch: LaunchSpec) -> Path | None:
    """Return where workers leave the run's name for those that torchrun starts after them.

    None if it starts no others.
    """
    if launch.agent is None:
        return None
    grows = launch.largest_size is not None and launch.largest_size > launch.world_size
    if launch.restarts == 0 and not grows:
        return None
    return parent / ".agents" / launch.agent


def _recorded_name(record: Path | None) -> str:
    """Return the run's name that the workers before these have recorded; "" if there is none."""
    if record is None or not record.exists():
        return ""
    name = read_regular(record, most_bytes=1000).decode(errors="replace")
    if not re.fullmatch(RUN_NAME, name):
        raise UserError(f"{record} must hold the name of a run, and holds {shown(name)}: remove it")
    return name


def _check_paths(config: Config, *, is_rank0: bool) -> None:
    """Raise UserError if a given path leads to something else than it must, e.g. to a FIFO."""
    for folder in (config.reports_folder, config.data_folder):
        check_folder(folder)
    if config.checkpoint is not None:
        regular_target(config.checkpoint)
    if is_rank0 and config.resume not in (None, "auto"):
        regular_target(Path(config.resume))


def _lock(folder: Path, world: World, locks: ExitStack) -> bool:
    """Lock the folder on each disk; return whether this rank holds the lock of its. Collective."""
    run = run_on_rank0(
        world, lambda: locks.enter_context(lock_folder(folder, advice=_ANOTHER_NAME))
    )
    keeps = world.is_rank0 or (world.local_rank == 0 and not is_locked_by(folder, run))

    def lock_own() -> None:
        if keeps and not world.is_rank0:
            locks.enter_context(lock_folder(folder, advice=_ANOTHER_NAME, run=run))

    run_on_all_ranks(world, lock_own)
    return keeps


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _has_files(folder: Path) -> bool:
    """Return whether a run has left anything in the folder; a lock is hidden."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def _check_ended(folder: Path, *, is_rank0: bool) -> None:
    """Raise UserError on rank 0 if a run writes to the folder."""
    if is_rank0 and _has_files(folder):
        with lock_folder(folder, advice=_ANOTHER_NAME):
            return


def _unused_name(parent: Path, name: str, world: World) -> str:
    """Return ``name``, or name-2, name-3, … if a run on any node has that name. Collective.

    Raises UserError on all ranks if one of these runs has not ended.
    """

    chosen = name
    number = 1
    while any(gather_objects(world, _has_files(parent / chosen), schema=bool)):
        run_on_all_ranks(world, partial(_check_ended, parent / chosen, is_rank0=world.is_rank0))
        number += 1
        chosen = f"{name}-{number}"
    if chosen != name and world.is_rank0:
        say(
            f"{parent / name} holds a run already: this one writes to {chosen}. To continue the "
            "earlier one, add --resume auto"
        )
    return chosen


def find_checkpoint(config: Config, job: Job, world: World) -> tuple[str | None, dict[str, Any]]:
    """Return path and entries of the checkpoint to resume from, on every rank. Collective.

    The path is one of a node's; None, without entries: a fresh start.

    Rank 0 reads a path given by --resume. With "auto", or if the job was restarted, the first rank
    of each node looks in the run's own folder if it resumes that run. Otherwise it looks in
    --checkpoint and, for a run without --run-name, in the earlier runs of the experiment.
    """
    given = config.resume or ""
    wanted = "auto" if job.resuming else run_on_rank0(world, lambda: given)
    if not wanted:
        return None, {}
    if wanted != "auto":
        return wanted, broadcast_checkpoint(world, wanted)
    source, newest = _newest_of_all(config, job, world)
    if world.is_rank0:
        say(_describe(newest, source, config, job))
    if not newest.path:
        return None, {}
    return newest.path, broadcast_checkpoint(world, newest.path, source=source)


def _newest_of_all(config: Config, job: Job, world: World) -> tuple[int, _Found]:
    """Return the lowest rank whose node has the newest checkpoint, and that one. Collective."""
    mine = _newest_here(config, job) if world.local_rank == 0 else _Found()
    found = gather_objects(world, mine, schema=_Found)

    def newness(rank: int) -> tuple[float, int]:
        # Of one run, the step counts, since clocks differ; of several, the one that was saved last.
        if job.resuming:
            return 0.0, found[rank].step
        return found[rank].saved_at, found[rank].step

    source = max(range(world.size), key=newness)
    return source, found[source]


def _describe(newest: _Found, source: int, config: Config, job: Job) -> str:
    """Return from what the run resumes, for the user; ``source`` : the rank that has it."""
    if newest.path:
        where = newest.path
        if source != 0:
            where += f" on rank {source}'s node"
        return f"resuming from {where}, step {newest.step}"
    searched = job.folder.path
    if not job.resuming and config.run_name is None:
        searched = searched.parent
    return f"no checkpoint in {searched}: starting from step 0"


def _newest_here(config: Config, job: Job) -> _Found:
    """Return the newest valid checkpoint that this node can read."""
    first = None
    folders = []
    if job.resuming:
        folders = [job.folder.checkpoints]
    else:
        if config.checkpoint is not None and config.checkpoint.exists():
            first = config.checkpoint
        # Not for a named run: a scheduler's new job must not resume another job's training.
        if config.run_name is None:
            folders = sorted(job.folder.path.parent.glob("*/checkpoints"))
    for folder in folders:
        remove_unfinished(folder)
    path, skipped = newest_checkpoint(folders, first=first)
    for reason in skipped:
        say(f"warning: {reason}")
    if path is None:
        return _Found()
    saved_at, step = time_of_saving(path)
    return _Found(str(path), saved_at, step)
