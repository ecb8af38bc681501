"""Lesson 10: slow, stop and kill a rank. What does each rank say?

Run it, and disturb a node from a second terminal, e.g. lab cluster fault --node 1 --kill:
lab cluster run --nodes 3 --rate 200mbit -- python learn/10_break_it.py {master}:{port} {nodes} {rank} 200
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_SECONDS = 6


def train(steps):
    """Exchange 2 MB a step, and print how long that took."""
    rank, gradient = dist.get_rank(), torch.ones(500_000)
    for step in range(1, steps + 1):
        time.sleep(0.1)  # forward and backward
        began = time.perf_counter()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        print(f"rank {rank} step {step} sync {time.perf_counter() - began:.3f} s", flush=True)


def find_culprit(printed):
    """Return the rank that was stopped or killed; None if all have ended well.

    printed : what each rank has printed, a list of texts. A survivor's last line says that it
    gives up; a rank that was killed or stopped has not printed such a line.
    """
    gave_up = ["gives up" in text for text in printed]
    return ...


ANSWERS = {
    # Node 1 is killed. How soon do the others stop: "at once", or after the "limit"?
    "a": ...,
    # Node 1 is stopped (--pause), and its connections stay open. "at once", or after the "limit"?
    "b": ...,
    # Node 1's link is slowed down. Can the ranks' own sync times tell who is slow: "yes" or "no"?
    "c": ...,
}

if __name__ == "__main__":
    address, (nodes, rank, steps) = sys.argv[1], map(int, sys.argv[2:])
    limit = timedelta(seconds=...)  # without one, Gloo waits for half an hour
    dist.init_process_group("gloo", f"tcp://{address}", world_size=nodes, rank=rank, timeout=limit)
    try:
        train(steps)
    except RuntimeError as error:
        why = str(error).partition("] ")[2].partition(". ")[0]  # between Gloo's place and advice
        print(f"rank {rank} gives up: {why}", flush=True)
        sys.exit(1)
    dist.destroy_process_group()
