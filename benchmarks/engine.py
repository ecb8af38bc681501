"""Compare the engine's step with that of a plain DistributedDataParallel loop, in turns.

    python benchmarks/engine.py                      # an MLP, 64 wide, and VGG-11; two ranks
    python benchmarks/engine.py --models mlp --rounds 20

Both loops train the same model on the same batches, which are in memory already, in the same
processes. The engine does all that ``train`` does in a step: weighing by samples, timing, loss and
accuracy over all ranks, the check for NaN. The plain loop does zero_grad, forward, loss, backward
and step. A block of each takes a turn, and every other round begins with the other. The time is the
wall time of a block, the CPU time that of rank 0's process: on a busy machine look at the latter.

The table after it says where the engine's step goes: its sections, and what lies outside them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.models import build_model
from common.profiling.records import SECTIONS, StepRecord
from common.training_engine import TrainingEngine, launch_distributed_training

CLASSES = 10
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """Return two hidden layers of 64."""
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


@dataclass(frozen=True)
class Case:
    """A model, the shape of a sample, and the steps of a block."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    samples: int
    steps: int


CASES = {
    "mlp": Case(mlp, (64,), samples=32, steps=200),
    "vgg11": Case(lambda: build_model("vgg11", CLASSES), (3, 32, 32), samples=32, steps=4),
}


class Engine:
    """The engine's loop; ``records`` are those of the last block."""

    def __init__(self, case: Case) -> None:
        model = case.build()
        self._engine = TrainingEngine(model, "cpu", distributed=True, sync_batchnorm=False)
        self._engine.prepare(torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss())
        self.records: list[StepRecord] = []

    def train(self, batches: Sequence[Batch]) -> None:
        """Train on each batch once."""
        self.records = []
        self._engine.train_epoch(batches, epoch=1, on_steps=self.records.extend)


class Plain:
    """The loop of PyTorch's tutorials."""

    def __init__(self, case: Case) -> None:
        self._model = DistributedDataParallel(case.build(), broadcast_buffers=False)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._criterion = nn.CrossEntropyLoss()

    def train(self, batches: Sequence[Batch]) -> None:
        """Train on each batch once."""
        self._model.train()
        for inputs, labels in batches:
            self._optimizer.zero_grad()
            loss = self._criterion(self._model(inputs), labels)
            loss.backward()
            self._optimizer.step()


def block(loop: Engine | Plain, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return wall and CPU seconds of a step."""
    dist.barrier()
    began = time.perf_counter()
    cpu = time.process_time()
    loop.train(batches)
    cpu = time.process_time() - cpu
    return (time.perf_counter() - began) / len(batches), cpu / len(batches)


def measure(rank: int, ranks: int, *, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the engine's and the plain loop's seconds a step in each round, and the sections'."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(case.steps):
        inputs = torch.randn(case.samples, *case.sample, generator=generator)
        labels = torch.randint(0, CLASSES, (case.samples,), generator=generator)
        batches.append((inputs, labels))
    engine, plain = Engine(case), Plain(case)
    found: dict[str, list[float]] = {}

    def note(row: str, seconds: float) -> None:
        found.setdefault(row, []).append(seconds)

    for loop in (engine, plain):
        loop.train(batches)  # warms up
    for number in range(rounds):
        order = [("engine", engine), ("plain", plain)]
        for row, loop in order[:: 1 if number % 2 else -1]:
            wall, cpu = block(loop, batches)
            note(row, wall)
            note(f"{row} CPU", cpu)
        of_step = statistics.fmean(record.step_seconds for record in engine.records)
        outside = of_step
        for section in SECTIONS:
            seconds = statistics.fmean(record.seconds[section] for record in engine.records)
            note(section, seconds)
            outside -= seconds
        note("outside", outside)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.models:
        found = launch_distributed_training(
            measure, arguments.ranks, "gloo", name=name, rounds=arguments.rounds
        )
        print(f"{name}, {arguments.ranks} ranks, median (minimum to maximum) of {arguments.rounds}")
        for row, seconds in found.items():
            ms = [1000 * one for one in seconds]
            print(f"  {row:<12}{statistics.median(ms):8.3f} ms ({min(ms):.3f} to {max(ms):.3f})")
        for kind in ("", " CPU"):
            pairs = zip(found[f"engine{kind}"], found[f"plain{kind}"], strict=True)
            ratios = [ours / plain for ours, plain in pairs]
            spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"  engine / plain{kind}: {statistics.median(ratios):.3f} {spread}", flush=True)


if __name__ == "__main__":
    main()
