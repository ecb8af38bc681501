"""Choose the folder that a run writes to, then the checkpoint that it resumes from.

Workers that torchrun restarts find their folder by the name of their agent: torchrun's own process
on each node, which outlives them. All ranks resume from the newest checkpoint on any node.
"""

import secrets
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from common.checkpoint import load_checkpoint, newest_checkpoint, time_of_saving
from common.config.schema import Config
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
from common.reporting.run_folder import RunFolder, new_run_name
from common.utils.atomic_files import remove_unfinished

_AGENTS = ".agents"
_NOTHING_FOUND = ("", -1.0, -1)  # path, time of saving and step of no checkpoint


@dataclass(frozen=True)
class Job:
    """A run and its folder on this node.

    resuming : whether the folder holds an earlier part of the same run.
    writes : whether this rank writes checkpoints. Rank 0 does; under torchrun with restarts, so
        does the first rank of each node that does not share rank 0's disk.
    """

    folder: RunFolder
    resuming: bool
    writes: bool


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from: its path on one of the nodes, and its entries."""

    path: str
    entries: dict[str, Any]


def open_job(config: Config, launch: LaunchSpec, world: World) -> Job:
    """Choose and create the run's folder, with the same name on every node. Collective.

    Raises UserError if the folder cannot be written, or if --run-name exists already and --resume
    is missing.
    """
    parent = config.reports_folder / config.experiment
    # Equal on all ranks, since collectives below depend on it.
    grows = launch.largest_size is not None and launch.largest_size > launch.size
    may_start_again = launch.agent is not None and (launch.restarts > 0 or grows)
    record = parent / _AGENTS / launch.agent if launch.agent and may_start_again else None
    mine = record.read_text(encoding="utf-8") if record is not None and record.is_file() else ""
    names = [name for name in gather_objects(world, mine) if name]
    resuming = bool(names)
    name = max(names) if names else run_on_rank0(world, lambda: _new_name(config, parent))
    if not resuming and config.run_name is not None:
        resuming = any(gather_objects(world, (parent / name / "config.json").exists()))
    folder = run_on_all_ranks(world, lambda: RunFolder(parent / name))
    if record is not None and world.local_rank == 0:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(name, encoding="utf-8")
    own_disk = _own_disk(folder.path, world) if may_start_again else False
    return Job(folder, resuming, world.is_rank0 or own_disk)


def _new_name(config: Config, parent: Path) -> str:
    if config.run_name is None:
        return new_run_name(parent)
    if (parent / config.run_name / "config.json").exists() and config.resume is None:
        raise UserError(
            f"--run-name: {parent / config.run_name} holds a run already: add --resume auto to "
            "resume it, or give another name"
        )
    return config.run_name


def _own_disk(folder: Path, world: World) -> bool:
    """Return whether this is its node's first rank and rank 0 has another disk. Collective."""

    def mark() -> str:
        name = f".seen-by-rank0-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    marker = folder / run_on_rank0(world, mark)  # --output-dir may differ from rank to rank
    seen = gather_objects(world, marker.exists())
    if world.is_rank0:  # every rank has looked by now
        marker.unlink()
    return world.local_rank == 0 and not seen[world.rank]


def find_checkpoint(config: Config, job: Job, world: World) -> ResumePoint | None:
    """Return the checkpoint to resume from, on every rank; None: a fresh start. Collective.

    Rank 0 reads a path given by --resume. With "auto", or if the job was restarted, the first rank
    of each node looks in the run's own folder if it resumes that run. Otherwise it looks in
    --checkpoint and, for a run without --run-name, in the earlier runs of the experiment.
    """
    wanted = "auto" if job.resuming else run_on_rank0(world, lambda: config.resume)
    if wanted is None:
        return None
    path, source = wanted, 0
    if wanted == "auto":
        found = gather_objects(
            world, _newest_here(config, job) if world.local_rank == 0 else _NOTHING_FOUND
        )
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
            return None
    return ResumePoint(path, broadcast_checkpoint(world, path, source=source))


def _newest_here(config: Config, job: Job) -> tuple[str, float, int]:
    """Return the newest valid checkpoint that this node can read: path, time of saving, step."""
    if not job.resuming and config.checkpoint is not None and config.checkpoint.exists():
        try:
            load_checkpoint(config.checkpoint)
            return str(config.checkpoint), *time_of_saving(config.checkpoint)
        except UserError as error:
            say(f"warning: {error}")
    folders = [job.folder.checkpoints] if job.resuming else []
    if not job.resuming and config.run_name is None:
        # Not for a named run: a scheduler's new job must not resume another job's training.
        folders = sorted(job.folder.path.parent.glob("*/checkpoints"))
    for folder in folders:
        remove_unfinished(folder)
    path, skipped = newest_checkpoint(folders)
    for reason in skipped:
        say(f"warning: {reason}")
    return (str(path), *time_of_saving(path)) if path else _NOTHING_FOUND
