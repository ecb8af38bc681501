"""This rank's clock offset from the mean of all ranks, to compare times measured on different nodes."""

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.distributed.collectives import gather_objects
from common.distributed.process_group import World

_ROUNDS = 9


def clock_offset(world: World) -> float:
    """Return by how many seconds this rank's ``time.perf_counter`` is ahead of the ranks' mean.

    Collective. Ranks on one machine share one clock: 0. Ranks on several machines leave a small
    all_reduce at nearly the same time, which serves as the common moment. The median over a few of
    them is accurate to about the network's latency.
    """
    if world.size == 1 or _one_machine(world):
        return 0.0
    leads = []
    for _ in range(_ROUNDS):
        dist.all_reduce(torch.zeros(1, device=world.device))
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        mine = time.perf_counter()
        total = torch.tensor([mine], dtype=torch.float64, device=world.device)
        dist.all_reduce(total)
        leads.append(mine - float(total) / world.size)
    return statistics.median(leads)


def _one_machine(world: World) -> bool:
    """Return whether all ranks run on one kernel; containers and namespaces share its clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not Linux
        boot = b""
    boots = gather_objects(world, boot)
    return b"" not in boots and len(set(boots)) == 1
