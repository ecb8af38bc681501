"""Choose and lock the folder that a run writes to, then the checkpoint that it resumes from.

Workers that torchrun restarts find their folder by the name of their agent: torchrun's own process
on each node, which outlives them. All ranks resume from the newest checkpoint on any node.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
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

_NOTHING_FOUND = ("", -1.0, -1)  # path, time of saving and step of no checkpoint


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

    ``locks`` releases the lock. Raises UserError if the folder cannot be written or another process
    writes there, or if --run-name exists already and --resume is missing.
    """
    run_on_all_ranks(world, lambda: _check_paths(config, is_rank0=world.is_rank0))
    parent = config.reports_folder / config.experiment_name
    # Equal on all ranks, since collectives below depend on it.
    grows = launch.largest_size is not None and launch.largest_size > launch.world_size
    may_start_again = launch.agent is not None and (launch.restarts > 0 or grows)
    record = parent / ".agents" / launch.agent if launch.agent and may_start_again else None
    mine = run_on_all_ranks(world, lambda: _recorded_name(record))
    name = max(gather_objects(world, mine, schema=str))
    resuming = bool(name)
    if not resuming:
        name = run_on_rank0(world, lambda: config.run_name or new_folder(parent).name)
    folder = run_on_all_ranks(world, lambda: RunFolder(parent / name))
    keeps = _lock(folder.path, world, locks)
    if not resuming and config.run_name is not None:
        resuming = _exists(config, folder.path, world)
    if record is not None and world.local_rank == 0:
        write_atomically(record, name.encode())
    return Job(folder, resuming, keeps, world.is_rank0 or (keeps and may_start_again))


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
    for file in (config.checkpoint, config.resume if is_rank0 else None):
        if file not in (None, "auto"):
            regular_target(Path(file))


def _lock(folder: Path, world: World, locks: ExitStack) -> bool:
    """Lock the folder on each disk; return whether this rank holds the lock of its. Collective."""
    advice = "give another --run-name"
    run = run_on_rank0(world, lambda: locks.enter_context(lock_folder(folder, advice=advice)))
    keeps = world.is_rank0 or (world.local_rank == 0 and not is_locked_by(folder, run))

    def lock_own() -> None:
        if keeps and not world.is_rank0:
            locks.enter_context(lock_folder(folder, advice=advice, run=run))

    run_on_all_ranks(world, lock_own)
    return keeps


def _exists(config: Config, folder: Path, world: World) -> bool:
    """Return whether any node has an earlier part of this run; UserError without --resume."""
    exists = (folder / "config.json").exists()
    refused = exists and world.is_rank0 and config.resume is None
    nodes = gather_objects(world, (exists, refused), schema=tuple[bool, bool])
    if any(refused for _, refused in nodes):
        raise UserError(
            f"--run-name: {folder} holds a run already: add --resume auto to resume it, or give "
            "another name"
        )
    return any(exists for exists, _ in nodes)


def find_checkpoint(config: Config, job: Job, world: World) -> tuple[str | None, dict[str, Any]]:
    """Return path and entries of the checkpoint to resume from, on every rank. Collective.

    The path is one of a node's; None, without entries: a fresh start.

    Rank 0 reads a path given by --resume. With "auto", or if the job was restarted, the first rank
    of each node looks in the run's own folder if it resumes that run. Otherwise it looks in
    --checkpoint and, for a run without --run-name, in the earlier runs of the experiment.
    """
    wanted = "auto" if job.resuming else run_on_rank0(world, lambda: config.resume or "")
    if not wanted:
        return None, {}
    path, source = wanted, 0
    if wanted == "auto":
        mine = _newest_here(config, job) if world.local_rank == 0 else _NOTHING_FOUND
        found = gather_objects(world, mine, schema=tuple[str, float, int])
        # Of one run, the step counts, since clocks differ; of several, the one that was saved last.
        order = itemgetter(2) if job.resuming else itemgetter(1, 2)
        source = max(range(world.size), key=lambda rank: order(found[rank]))  # the lowest rank's
        path, _, step = found[source]
        if world.is_rank0:
            where = f" on rank {source}'s node" if source else ""
            own = job.resuming or config.run_name is not None
            say(
                f"resuming from {path}{where}, step {step}"
                if path
                else f"no checkpoint in {job.folder.path if own else job.folder.path.parent}: "
                "starting from step 0"
            )
        if not path:
            return None, {}
    return path, broadcast_checkpoint(world, path, source=source)


def _newest_here(config: Config, job: Job) -> tuple[str, float, int]:
    """Return the newest valid checkpoint that this node can read: path, time of saving, step."""
    named = config.checkpoint
    first = named if not job.resuming and named is not None and named.exists() else None
    folders = [job.folder.checkpoints] if job.resuming else []
    if not job.resuming and config.run_name is None:
        # Not for a named run: a scheduler's new job must not resume another job's training.
        folders = sorted(job.folder.path.parent.glob("*/checkpoints"))
    for folder in folders:
        remove_unfinished(folder)
    path, skipped = newest_checkpoint(folders, first=first)
    for reason in skipped:
        say(f"warning: {reason}")
    return (str(path), *time_of_saving(path)) if path else _NOTHING_FOUND
