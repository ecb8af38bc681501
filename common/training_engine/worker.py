"""One rank of ``launch_distributed_training``; the command line gives a folder and the rank.

It opens the group, calls the function stored in the folder's call.pkl, and writes how it ended to
the folder, as a ``WorkerOutcome``.
"""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from common.distributed.failures import explain_collective_failure
from common.distributed.gpus import gpu_of
from common.training_engine.engine import TrainingEngine
from common.training_engine.launch import WorkerOutcome, outcome_file
from common.utils.atomic_files import write_atomically
from common.utils.processes import end_process
from common.utils.system import usable_cores

_TIMEOUT = timedelta(seconds=60)
_PATIENCE = timedelta(hours=2)  # for a rank that still writes a report


def main(folder: Path, rank: int) -> int:
    """Run the rank and return its exit status."""
    stage = "arguments"
    try:
        train_fn, world_size, backend, config = cloudpickle.loads(
            (folder / "call.pkl").read_bytes()
        )
        stage = "group"
        patient = _open_group(folder, rank, world_size, backend)
        stage = "training"
        result = train_fn(rank, world_size, **config)
        if dist.is_initialized():  # the function may have closed it
            dist.barrier(group=patient)  # rank 0 may still be writing a report
        content = cloudpickle.dumps(WorkerOutcome("done", result if rank == 0 else None))
        stage = "done"
    except BaseException as error:
        outcome = WorkerOutcome(
            stage,
            error=str(error) or type(error).__name__,
            traceback=traceback.format_exc(),
            blame=0 if explain_collective_failure(error) is None else 2,
        )
        content = cloudpickle.dumps(outcome)
    write_atomically(outcome_file(folder, rank), content)
    TrainingEngine.cleanup_distributed()
    return int(stage != "done")


def _open_group(folder: Path, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """Open the group and return a second one, with a timeout of hours.

    The ranks meet in a file, which needs no free port. They use loopback unless the user has chosen
    another interface; under NCCL Gloo connects the second group.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(gpu_of(rank))
    else:
        torch.set_num_threads(max(1, usable_cores() // world_size))
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    dist.barrier()  # shows that the group works
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(patient, dist.ProcessGroup)  # a number only for ranks outside the group
    return patient


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1]), int(sys.argv[2])))
