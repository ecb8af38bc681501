"""Measure what the signs of life cost: training steps with and without their thread, in turns.

    python benchmarks/heartbeat.py

Two real ranks train a model of one small layer over loopback, one torch thread each. That is the
worst case: the shorter the step, the more a thread that takes turns with it costs. Blocks of steps
with and without the thread (common/distributed/failures.py) follow each other in one process
group, in the order A B B A. Each pair of blocks gives a ratio. A block has the same number of steps
on all ranks and in both ways, and its time is rank 0's wall time between two barriers.

The marks that say where a rank is are always set. They are timed by themselves.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from loader import REPOSITORY, SEED, describe_machine, whole_number
from sync import shown
from torch import nn

sys.path.insert(0, str(REPOSITORY))

from common.distributed.failures import Activity, FailureWatch
from common.distributed.launch_env import LaunchSpec
from common.training_engine import TrainingEngine
from lab.proofs.ranks import run_ranks

RANKS, CLASSES = 2, 10
_BATCH = 32
_MARKS_PER_STEP = 7  # sections of a step that exchanges gradients
_WARM_UP_STEPS = 200


def build_step() -> tuple[TrainingEngine, Callable[[], None]]:
    """Return an engine for a small model, and a function that does one step with it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES))
    engine = TrainingEngine(model, "cpu", distributed=True, sync="all_reduce")
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss())
    images, labels = torch.randn(_BATCH, 3, 8, 8), torch.randint(CLASSES, (_BATCH,))

    def step() -> None:
        engine.train_step([(images, labels)], global_samples=RANKS * _BATCH)
        engine.timer.take()

    return engine, step


def measure_block(step: Callable[[], None], steps: int, heartbeat: FailureWatch | None) -> float:
    """Return the seconds of a step, with the thread of ``heartbeat`` or without one."""
    if heartbeat is not None:
        heartbeat.start()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    seconds = time.perf_counter() - began
    if heartbeat is not None:
        heartbeat.close()
    return seconds / steps


def measure(rank: int, port_file: str, arguments: argparse.Namespace) -> tuple[int, dict]:
    """Return the steps of a block, and the seconds of a step in each pair of blocks."""
    torch.manual_seed(SEED + rank)
    files = dist.FileStore(port_file, RANKS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")), is_master=False)
    engine, step = build_step()
    warm = [measure_block(step, _WARM_UP_STEPS, None) for _ in range(2)][-1]
    steps = torch.tensor(int(arguments.seconds / warm))
    dist.broadcast(steps, src=0)
    found: dict[str, list[float]] = {"with": [], "without": []}
    for pair in range(arguments.pairs):
        for name in ("with", "without") if pair % 2 else ("without", "with"):
            heartbeat = FailureWatch(
                store,
                LaunchSpec(rank, RANKS, "127.0.0.1", store.port),
                activity=engine.world.activity,
                timeout_seconds=60,
            )
            found[name].append(
                measure_block(step, int(steps), heartbeat if name == "with" else None)
            )
    dist.barrier()  # the store of rank 0 stays until the last rank is done
    return int(steps), found


def seconds_per_mark(count: int = 1_000_000) -> float:
    """Return the seconds that ``Activity.enter`` takes."""
    activity = Activity()
    began = time.perf_counter()
    for _ in range(count):
        activity.enter("forward")
    return (time.perf_counter() - began) / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=whole_number, default=20, help="pairs of blocks (default: 20)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="length of a block, in seconds (default: 4)"
    )
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        (steps, found), *_ = run_ranks(
            RANKS, measure, f"{folder}/port", arguments, timeout_seconds=3600
        )
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    print(
        f"\n{RANKS} ranks, {len(ratios)} pairs of blocks of {steps:,} steps: median (95 % interval)"
    )
    for name, seconds in found.items():
        print(f"step {name} the thread, ms   {shown([1000 * s for s in seconds], '.4f')}")
    print(f"with / without               {shown(ratios, '.4f')}")
    mark = seconds_per_mark()
    step = sum(found["without"]) / len(ratios)
    print(
        f"a mark                       {1e9 * mark:.0f} ns; {_MARKS_PER_STEP} a step: "
        f"{100 * _MARKS_PER_STEP * mark / step:.3f} % of the step"
    )


if __name__ == "__main__":
    main()
