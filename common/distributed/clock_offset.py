"""This rank's clock offset from the mean of all ranks, to compare times of several nodes."""

import statistics
import time

import torch
import torch.distributed as dist

from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.utils.system import lines_of

_ROUNDS = 9


def clock_offset(world: World) -> float:
    """Return by how many seconds this rank's ``time.perf_counter`` is ahead of the ranks' mean.

    A collective call. Ranks on one machine share one clock, so the result is 0. Ranks on several
    machines leave a small all_reduce at nearly the same time, and that moment is their reference.
    The median over a few rounds is accurate to about the network's latency.
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
    boot = "".join(lines_of("/proc/sys/kernel/random/boot_id"))  # empty off Linux
    return boot != "" and set(gather_objects(world, boot, schema=str)) == {boot}
