"""Measure what ``lab audit``'s probe costs: training steps with and without it, in turns.

    python benchmarks/audit_overhead.py

Two real ranks train VGG-11 with DistributedDataParallel on random pictures of CIFAR-10's shape, as
a student's script does, one torch thread each. The probe cannot leave a process, so runs with and
without it follow each other in processes of their own, in the order A B B A. Each pair of runs
gives a ratio of wall time a step, and one of processor time.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from loader import SEED, describe_machine, parse_flags, whole_number
from sync import shown
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from common.models import build_model
from lab.audit import probe
from lab.proofs.ranks import run_ranks

RANKS, BATCH, WARM_UP_STEPS = 2, 64, 2


def train(rank: int, folder: Path, steps: int, probed: bool) -> tuple[float, float]:
    """Return the wall and the processor seconds of a step of a plain DDP script."""
    if probed:
        settings = {"folder": str(folder), "script": str(Path(__file__).parent), "rank": rank}
        settings |= {"steps": 10**6, "size": RANKS, "clocks": False}
        os.environ[probe.ENVIRONMENT] = json.dumps(settings)
        probe.install()
    torch.manual_seed(SEED)
    samples = (steps + WARM_UP_STEPS) * BATCH * RANKS
    dataset = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))
    model = DistributedDataParallel(build_model("vgg11", 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    began = used = 0.0
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    for step, (images, labels) in enumerate(loader):
        if step == WARM_UP_STEPS:
            began, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
    ended, used = time.perf_counter(), time.process_time() - used
    return (ended - began) / steps, used / steps


def main() -> None:
    """Measure and print."""
    flags = {
        "--pairs": {"type": whole_number, "default": 6, "help": "pairs of runs (default: 6)"},
        "--steps": {"type": whole_number, "default": 10, "help": "of a run (default: 10)"},
    }
    arguments = parse_flags(__doc__, flags)
    print(describe_machine())
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for pair in range(arguments.pairs):
        for probed in (True, False) if pair % 2 else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                seconds, _ = run_ranks(
                    *(RANKS, train, Path(folder), arguments.steps, probed), timeout_seconds=600
                )
            found[probed].append(seconds)
    print(
        f"\n{RANKS} ranks, batch {BATCH} each, {arguments.pairs} pairs of {arguments.steps} steps"
    )
    for index, name in enumerate(("wall", "processor")):
        plain, watched = ([one[index] for one in found[probed]] for probed in (False, True))
        ratios = [one / other for one, other in zip(watched, plain, strict=True)]
        print(f"{name} seconds a step, plain    {shown(plain, '.3f')}")
        print(f"{name} seconds a step, probed   {shown(watched, '.3f')}")
        print(f"{name}, probed / plain          {shown(ratios, '.3f')}")


if __name__ == "__main__":
    main()
