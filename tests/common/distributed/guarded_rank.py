"""A rank whose collectives run in another thread, as NCCL's on the GPU; the main thread waits in C.

    python guarded_rank.py RANK PORT WHAT

A thread does the collective over Gloo and notes how it breaks, as NCCL's watchdog does. WHAT is
"collective": rank 0 (or 1) waits for the other one; "fails": rank 1 raises an error; "busy": no
rank is in a collective for longer than the timeout.
"""

import ctypes
import sys
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from common.distributed import process_group as module
from common.distributed.failures import timed_out
from common.distributed.launch_env import LaunchSpec
from common.errors import UserError
from common.utils.processes import end_process, in_thread

TIMEOUT_SECONDS = 6.0

rank, port, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
waits = what.startswith("collective") and rank == int(what[-1])
collective = None


def watchdog():
    """Return how the collective broke, as ``nccl_failure`` does."""
    if collective is None or not collective.done() or (error := collective.exception()) is None:
        return None
    return timed_out(error)


def wait_in_c(seconds):
    """Block in C, where no exception and no signal handler of Python reaches the thread."""
    ctypes.CDLL(None).usleep(int(seconds * 1e6))


with (
    mock.patch.object(module, "_ASYNCHRONOUS", ("gloo",)),
    mock.patch.object(module, "nccl_failure", watchdog),
):
    try:
        launch = LaunchSpec(rank, 2, "127.0.0.1", port)
        with module.process_group(launch, timeout_seconds=TIMEOUT_SECONDS) as world:
            side = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
            world.activity.step = 7
            world.activity.enter("backward" if waits else "data")
            time.sleep(1.5)  # until a sign of life has said so
            print("ready", flush=True)
            if waits:
                tensor = torch.zeros(1)
                collective = in_thread(lambda: dist.all_reduce(tensor, group=side))
            if what == "fails" and rank == 1:
                raise UserError("the disk is full")
            wait_in_c(TIMEOUT_SECONDS + 4 if what == "busy" else 60)
        print("ended well", flush=True)
    except UserError as error:
        print(f"own error: {error}", file=sys.stderr, flush=True)
        end_process(1)
    end_process(0)
