"""``launch_distributed_training``: start a process for each rank from a script or a notebook.

Each rank is a fresh interpreter (worker.py) that reads the function and its arguments from a file.
cloudpickle writes that file, so lambdas and functions defined in a notebook work. The caller's
script does not run again. Reading the file runs what it says; only this user can write to its
folder (mode 0700), and nothing of it is sent to another machine.
"""

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.distributed.process_group import current_world
from common.distributed.spawn import RankExits, run_local_ranks
from common.errors import UserError
from common.training_engine.engine import TrainingEngine
from common.utils.paths import REPOSITORY
from common.utils.processes import how_ended


class WorkerError(RuntimeError):
    """Rank ``rank`` failed; the message holds its ``worker_traceback``."""

    def __init__(self, rank: int, worker_traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{worker_traceback}")
        self.rank = rank
        self.worker_traceback = worker_traceback


@dataclass(frozen=True)
class WorkerOutcome:
    """How a rank ended; a worker writes it to a file.

    stage : "done", or where it failed: reading its "arguments", forming the "group", "training";
        "killed" if its process has left no message.
    result : of ``train_fn``, on rank 0.
    error, traceback : of a failure.
    blame : 0: the rank's own error; 1: its process ended, and nobody knows why; 2: a collective
        broke, probably since another rank had failed; 3: killed, since another rank had failed.
    """

    stage: str
    result: Any = None
    error: str = ""
    traceback: str = ""
    blame: int = 0


def distributed_train_worker(
    rank: int,
    world_size: int,
    *,
    model_fn: Callable[[], nn.Module],
    train_dataset: Dataset,
    val_dataset: Dataset | None = None,
    batch_size: int,
    num_workers: int = 0,
    optimizer_fn: Callable[..., Optimizer],
    criterion_fn: Callable[[], nn.Module],
    scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    train_kwargs: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Build engine, loaders and optimiser of this rank; train; return the history of ``train``.

    Parameters
    ----------
    model_fn, criterion_fn : return a new model and criterion. All ranks get rank 0's weights; a
        ``seed`` in ``train_kwargs`` seeds torch before the model is built.
    train_dataset, val_dataset : yield (input, label); a DistributedSampler divides them.
    batch_size : PER PROCESS: the global batch is this x ``world_size`` x ``accumulation_steps``.
    num_workers : processes of each loader.
    optimizer_fn : called with the model's trainable parameters.
    scheduler_fn : called with the optimiser.
    engine_kwargs, train_kwargs : further arguments of ``TrainingEngine`` and
        ``TrainingEngine.train`` (``num_epochs``, ...).
    """
    if world_size > 1:
        TrainingEngine.setup_distributed(rank, world_size)
    world = current_world()
    device = world.device
    if world.backend is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def loader(dataset: Dataset, *, train: bool) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=DistributedSampler(dataset, world_size, rank, shuffle=train),
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
        )

    train_kwargs = train_kwargs or {}
    if train_kwargs.get("seed") is not None:
        torch.manual_seed(train_kwargs["seed"])  # for the model's first weights
    engine = TrainingEngine(model_fn(), device, distributed=world_size > 1, **(engine_kwargs or {}))
    optimizer = optimizer_fn([p for p in engine.model.parameters() if p.requires_grad])
    return engine.train(
        loader(train_dataset, train=True),
        None if val_dataset is None else loader(val_dataset, train=False),
        optimizer,
        criterion_fn(),
        scheduler=None if scheduler_fn is None else scheduler_fn(optimizer),
        **train_kwargs,
    )


def launch_distributed_training(
    train_fn: Callable[..., Any], world_size: int, backend: str = "nccl", **config: Any
) -> Any:
    """Call ``train_fn(rank, world_size, **config)`` on every rank and return rank 0's result.

    Parameters
    ----------
    train_fn : e.g. ``distributed_train_worker``; called when the process group is open. It and
        ``config`` may be or hold lambdas and functions of a notebook.
    world_size : number of ranks, one process each; 0 and 1 mean this process.
    backend : "nccl" needs a GPU for each rank; otherwise Gloo trains on the CPU, with a warning.

    If the group cannot be set up, a warning says why, and this process trains alone. Raises
    WorkerError, with rank and traceback, if a rank fails during training; training is never
    retried. Raises UserError on invalid arguments. Leaves no process behind.
    """
    if backend not in ("nccl", "gloo"):
        raise UserError(f"backend: got {backend!r}, choose nccl or gloo")
    if world_size < 0:
        raise UserError(
            f"world_size: got {world_size}, give the number of processes (0: one, on this device)"
        )
    if world_size > 1:
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        if backend == "nccl" and gpus < world_size:
            warnings.warn(
                f"NCCL needs a GPU for each of the {world_size} ranks, and this machine has {gpus} "
                "that torch can use with NCCL: training on the CPU with Gloo",
                stacklevel=2,
            )
            backend = "gloo"
        outcomes = _in_processes(train_fn, world_size, backend, config)
        if all(outcome.stage == "done" for outcome in outcomes.values()):
            return outcomes[0].result
        reason = _why_there_is_no_group(outcomes)
        warnings.warn(
            f"the process group could not be set up ({reason}): training on one device",
            stacklevel=2,
        )
    try:
        return train_fn(0, 1, **config)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WorkerError(0, traceback.format_exc()) from error


def _why_there_is_no_group(outcomes: dict[int, WorkerOutcome]) -> str:
    """Return why the ranks that failed had no group; raise WorkerError if anything else failed."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.stage != "done"}
    told = [outcome for outcome in failed.values() if outcome.stage != "killed"]
    if told and all(outcome.stage == "group" for outcome in told):
        return "; ".join(outcome.error for outcome in told)
    rank = min(failed, key=lambda rank: failed[rank].blame)  # the first of equal ones
    raise WorkerError(rank, failed[rank].traceback)


def _in_processes(
    train_fn: Callable[..., Any], world_size: int, backend: str, config: dict[str, Any]
) -> dict[int, WorkerOutcome]:
    """Run a worker for each rank; return how each ended, first those that failed, in order."""
    with tempfile.TemporaryDirectory(prefix="data-parallel-") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(
            cloudpickle.dumps((train_fn, world_size, backend, config))
        )
        # This repository comes first, for `-m`; the caller's path follows, for modules pickled by
        # name. -P keeps out the current folder, whose `common` could hide ours.
        path = [str(REPOSITORY), *(entry or os.getcwd() for entry in sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        worker = [sys.executable, "-P", "-m", "common.training_engine.worker", name]
        exits = run_local_ranks(
            [[*worker, str(rank)] for rank in range(world_size)],
            environments=[environment] * world_size,
        )
        order = dict.fromkeys([*exits.failed, *range(world_size)])
        return {rank: _read_outcome(folder, rank, exits) for rank in order}


def _read_outcome(folder: Path, rank: int, exits: RankExits) -> WorkerOutcome:
    path = outcome_file(folder, rank)
    if path.exists():
        return cloudpickle.loads(path.read_bytes())
    status = exits.statuses[rank]
    ended_by_itself = rank in exits.failed or status == 0
    return WorkerOutcome(
        "killed",
        traceback=f"its process {how_ended(status)} and left no message",
        blame=1 if ended_by_itself else 3,
    )


def outcome_file(folder: Path, rank: int) -> Path:
    """Return the file to which a worker writes its ``WorkerOutcome``."""
    return folder / f"outcome{rank}.pkl"
