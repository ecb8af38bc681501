"""One rank of ``launch_distributed_training``, started with a folder and its rank.

It opens the group, calls the function in the folder's call.pkl, and writes the outcome there: the
result, or the traceback and the stage that failed ("arguments", "group" or "training").
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
from common.training_engine.engine import TrainingEngine
from common.training_engine.launch import OUTCOME_FILE
from common.utils.processes import end_process
from common.utils.system import usable_cores

_TIMEOUT, _PATIENCE = timedelta(seconds=60), timedelta(hours=2)


def main(folder: Path, rank: int) -> int:
    """Run the rank and return its exit status."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    outcome: dict[str, Any] = {"stage": "arguments", "result": None, "consequence": False}
    try:
        train_fn, world_size, backend, config = cloudpickle.loads(
            (folder / "call.pkl").read_bytes()
        )
        outcome["stage"] = "group"
        patient = _open_group(folder, rank, world_size, backend)
        outcome["stage"] = "training"
        outcome["result"] = train_fn(rank, world_size, **config)
        if dist.is_initialized():  # the function may have closed it
            dist.barrier(group=patient)  # rank 0 may still be writing a report
        content, status = cloudpickle.dumps(outcome if rank == 0 else outcome | {"result": None}), 0
    except BaseException as error:
        outcome |= {
            "result": None,
            "error": str(error) or type(error).__name__,
            "traceback": traceback.format_exc(),
            "time": time.time(),
            "consequence": explain_collective_failure(error) is not None,
        }
        content, status = cloudpickle.dumps(outcome), 1
    written = folder / f"{rank}.tmp"
    written.write_bytes(content)
    written.rename(folder / OUTCOME_FILE.format(rank))
    TrainingEngine.cleanup_distributed()
    return status


def _open_group(folder: Path, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """Form the group and return a second one, whose members wait for hours for each other.

    The ranks meet in a file, so no port can be taken. They use loopback unless the user has chosen
    another interface.
    """
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, usable_cores() // world_size))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    dist.barrier()  # only now is the group known to work
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(patient, dist.ProcessGroup)  # a number only where this rank is no member
    return patient


def _end_with_caller() -> None:
    """End this process once the caller's has ended. On Linux the kernel kills it sooner."""
    caller = os.getppid()
    while os.getppid() == caller:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1]), int(sys.argv[2])))
