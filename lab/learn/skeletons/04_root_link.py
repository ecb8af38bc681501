"""Lesson 4: how long lesson 3's exchange takes, by a formula and on links of a known rate.

Run it:
lab cluster run --nodes 4 --rate 1gbit -- python learn/04_root_link.py {master}:{port} {nodes} {rank}
"""

import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

LESSON_3 = Path(__file__).with_name("03_gather_scatter.py")


def exchange_seconds(nodes, gradient_mb, rate_gbit):
    """Return how long rank 0's link needs in a step, first in and then out; a byte has 8 bits."""
    return ...


def measure(gradient_mb=36.92, steps=3):
    """Return the mean seconds of an exchange, without a first one that opens the connections."""
    average_gradients = runpy.run_path(LESSON_3)["average_gradients"]
    model = nn.Linear(1000, round(gradient_mb * 1e6 / 4 / 1000), bias=False)  # 4 bytes a number
    model.weight.grad = torch.ones_like(model.weight)
    average_gradients(model)
    dist.barrier()  # all begin together
    began = time.perf_counter()
    for _ in range(steps):
        average_gradients(model)
    return (time.perf_counter() - began) / steps


ANSWERS = {
    # 8 nodes in place of 4, at 1 Gbit/s with 36.92 MB: how many seconds, by the formula?
    "a": ...,
    # Which rate in Gbit/s brings these 8 nodes' exchange back to 4 nodes' time at 1 Gbit/s?
    "b": ...,
    # One node computes a step of VGG-11 in 0.6 s, and 4 nodes share the work evenly. With this
    # exchange at 1 Gbit/s after it, how many times as fast as one node are they?
    "c": ...,
}

if __name__ == "__main__":
    address, nodes, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", f"tcp://{address}", world_size=nodes, rank=rank)
    seconds = measure()
    if rank == 0:
        print(f"measured: {seconds:.3f} s an exchange on {nodes} nodes")
    dist.destroy_process_group()
