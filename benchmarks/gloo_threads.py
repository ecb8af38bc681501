"""Measure the time saved when ranks do not interrupt each other: exchanges and steps, in turns.

    python benchmarks/gloo_threads.py

Real ranks over loopback, one torch thread each. Process groups come in pairs: one is under
``batch_scheduling`` (common/utils/system.py), as this project does it for more ranks than cores,
and one is not. In each group the ranks pass 64 bytes around a ring, and train VGG-11 with some
strategies. Each pair of groups gives a ratio; a time is the slowest rank's.
"""

import argparse
import os
import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from loader import REPOSITORY, describe_machine, whole_number
from sync import Steps, shown, slowest

sys.path.insert(0, str(REPOSITORY))

from common.sync.p2p import send_and_receive
from common.utils.system import batch_scheduling, tune_malloc
from lab.proofs.ranks import run_ranks

STRATEGIES = ("all_reduce", "ring", "overlapped", "ddp")
_EXCHANGES, _WARM_UP_STEPS, _STEPS = 200, 2, 5


def seconds_per_exchange() -> float:
    """Return the seconds of one round of a ring: a message to the next rank, one from another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, coming = torch.zeros(16), torch.zeros(16)

    def exchange() -> None:
        for _ in range(_EXCHANGES):
            send_and_receive(mine, coming, to=(rank + 1) % size, source=(rank - 1) % size)

    return slowest(exchange) / _EXCHANGES


def seconds_per_step(strategy: str, batch_size: int) -> float:
    """Return the median of some steps of VGG-11."""
    steps = Steps(strategy, batch_size=batch_size)
    seconds = [steps.measure() for _ in range(_WARM_UP_STEPS + _STEPS)]
    return statistics.median(seconds[_WARM_UP_STEPS:])


def measure(rank: int, size: int, folder: str, pairs: int, batch_size: int) -> dict[str, list]:
    """Return the pairs (with, without) of seconds on one rank, by what was measured."""
    tune_malloc()  # as run() does
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # run_ranks has chosen
    found: dict[str, list[dict[bool, float]]] = {}
    for pair in range(pairs):
        for wanted in (True, False) if pair % 2 else (False, True):
            dist.destroy_process_group()
            store = dist.FileStore(str(Path(folder) / f"{pair}-{wanted}"), size)
            with batch_scheduling(wanted):
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
                )
                seconds_per_exchange()
                seconds = {"exchange of 64 bytes": seconds_per_exchange()}
                for name in STRATEGIES:
                    seconds[f"step, {name}"] = seconds_per_step(name, batch_size)
            for name, value in seconds.items():
                found.setdefault(name, [{} for _ in range(pairs)])[pair][wanted] = value
    return {name: [(one[True], one[False]) for one in values] for name, values in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=whole_number, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--pairs", type=whole_number, default=8, help="pairs of groups (default: 8)"
    )
    parser.add_argument(
        "--batch-size", type=whole_number, default=16, help="of a rank (default: 16)"
    )
    arguments = parser.parse_args()
    if not hasattr(os, "SCHED_BATCH"):
        sys.exit(f"error: {sys.platform} has no SCHED_BATCH: run this on Linux")
    print(describe_machine())
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found, *_ = run_ranks(
                size,
                measure,
                size,
                folder,
                arguments.pairs,
                arguments.batch_size,
                timeout_seconds=1200,
            )
        print(f"\n{size} ranks, {arguments.pairs} pairs of groups: median (95 % interval)")
        print(f"{'':<22}{'with, ms':<26}{'without, ms':<26}with / without")
        for name, pairs in found.items():
            ratios = shown([one / other for one, other in pairs], ".3f")
            here, without = (
                shown([1000 * seconds for seconds in way], ".2f")
                for way in zip(*pairs, strict=True)
            )
            print(f"{name:<22}{here:<26}{without:<26}{ratios}")


if __name__ == "__main__":
    main()
