"""This rank's clock offset from the mean of all ranks, so that times measured on different nodes can be compared."""

import hashlib
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.distributed.process_group import World

_ROUNDS = 9


def clock_offset(world: World) -> float:
    """Return the seconds that this rank's ``time.perf_counter`` is ahead of the mean of all ranks' clocks. Collective.

    Ranks on one machine read one clock: 0. Ranks on several machines leave a small all_reduce within about a message's time,
    so its end counts as one moment; the median over a few of them is accurate to about the network's latency.
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
    """Whether all ranks run under one boot of one kernel; containers and namespaces share its clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not Linux
        boot = b""
    number = int.from_bytes(hashlib.sha256(boot).digest()[:6], "big") if boot else -1 - world.rank
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=world.device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return int(extremes[0]) == -int(extremes[1])
