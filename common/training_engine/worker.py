"""One rank of ``launch_distributed_training``; the command line gives a folder and the rank.

It opens the group, calls the function stored in the folder's call.pkl, and writes the outcome to
the folder: the result, or the traceback and the failed stage ("arguments", "group" or "training").
"""

import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from common.distributed.failures import explain_collective_failure
from common.distributed.gpus import gpu_of
from common.training_engine.engine import TrainingEngine
from common.training_engine.launch import OUTCOME_FILE
from common.utils.processes import end_process
from common.utils.system import usable_cores

_TIMEOUT, _PATIENCE = timedelta(seconds=60), timedelta(hours=2)


def main(folder: Path, rank: int) -> int:
    """Run the rank and return its exit status."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    outcome: dict[str, Any] = {"stage": "arguments"}
    try:
        train_fn, world_size, backend, config = cloudpickle.loads(
            (folder / "call.pkl").read_bytes()
        )
        outcome["stage"] = "group"
        patient = _open_group(folder, rank, world_size, backend)
        outcome["stage"] = "training"
        result = train_fn(rank, world_size, **config)
        if dist.is_initialized():  # the function may have closed it
            dist.barrier(group=patient)  # rank 0 may still be writing a report
        outcome["result"] = result if rank == 0 else None
        content = cloudpickle.dumps(outcome)
    except BaseException as error:
        outcome |= {
            "result": None,  # perhaps the one that cannot be pickled
            "error": str(error) or type(error).__name__,
            "traceback": traceback.format_exc(),
            "time": time.time(),
            "consequence": explain_collective_failure(error) is not None,
        }
        content = cloudpickle.dumps(outcome)
    written = folder / f"{rank}.tmp"
    written.write_bytes(content)
    written.rename(folder / OUTCOME_FILE.format(rank))
    TrainingEngine.cleanup_distributed()
    return int("error" in outcome)


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


def _end_with_caller() -> None:
    """End this process soon after the caller ends. On Linux the kernel kills it sooner."""
    caller = os.getppid()
    while os.getppid() == caller:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1]), int(sys.argv[2])))
