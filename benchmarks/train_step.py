"""Compare one node's training step with a plain loop and with the machine's matrix product.

    python benchmarks/train_step.py

It also measures the peak memory of a real run. Blocks of steps take turns in one process tree, with
the same number of threads and the same VGG-11:

- ours: ``TrainingEngine.train_epoch`` with sync "none", fed by ``TrainLoader``. It includes all
  that a run of PartOne does in its steps: data, loss, accuracy, schedule, timing hooks, the check
  for NaN, and a line per step in ``metrics.jsonl``. Only the progress line is left out.
- plain: torchvision's dataset with PIL transforms in a DataLoader with 2 workers, default (NCHW)
  strides, and in each step zero_grad, forward, loss, backward, step, ``loss.item()`` and
  scikit-learn's accuracy. It runs in its own process, so that none of our settings reaches it.
- sgemm: ``torch.mm`` of two large float32 matrices, before, between and after the two loops.

What keeps the comparison fair:

- The plain loop's workers would take cores from the other measurements. They work only to refill
  their queue, so the program waits before each block, of either loop, until they use no CPU at all.
  A batch takes them far less time than a step takes, so the queue is full again within each block:
  a block pays for as many batches as it takes.
- Every other round begins with the other loop, and both loops warm up first.
- All batches have one size. The time is the wall time of a whole block, divided by its steps.
- A child process runs the real run whose peak memory is measured, before anything trains here. The
  peak that Linux reports for a child is at least what its parent held when it started the child.
  Only before the training here is that less than the child's own peak.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from loader import (
    DATA_FLAGS,
    PLAIN_WORKERS,
    REPOSITORY,
    SEED,
    describe_machine,
    endless,
    load_benchmark_dataset,
    our_loader,
    parse_flags,
    plain_loader,
    spread,
    wait_until_idle,
    whole_number,
)
from sklearn.metrics import accuracy_score
from torch import nn

from common.data.dataset import Dataset
from common.models import build_model
from common.reporting.run_folder import RunFolder
from common.training import prepare_model_for_training
from common.training_engine import TrainingEngine
from common.training_engine.lr_schedules import build_schedule
from common.utils.system import tune_malloc, usable_cores

# Multiply-adds of one sample's forward pass. Each is 2 operations, and the backward pass counts as
# two more forward passes.
VGG11_MACS = 152.8e6

_WARM_UP_STEPS = 2
_MEMORY_STEPS = 4
_SGEMM_SIZE, _SGEMM_REPEATS = 3072, 2


class Ours:
    """This project's step, as ``common.experiment.run.run`` builds it for PartOne on a CPU."""

    def __init__(
        self, dataset: Dataset, folder: Path, *, batch_size: int, total_steps: int
    ) -> None:
        torch.manual_seed(SEED)
        self._loader = our_loader(dataset, batch_size=batch_size)
        self._folder = RunFolder(folder)
        model, criterion, optimizer = prepare_model_for_training(
            build_model("vgg11", len(dataset.class_names)), "cpu", 0.02, 0.9, 5e-4, False
        )
        self._engine = TrainingEngine(model, "cpu")
        self._engine.prepare(
            optimizer, criterion, build_schedule(optimizer, "onecycle", total_steps=total_steps)
        )
        self._epoch = 0

    def train(self, steps: int) -> None:
        """Train this number of steps; every call begins a new epoch."""
        last = self._engine.step + steps
        while self._engine.step < last:
            self._epoch += 1
            self._loader.sampler.set_epoch(self._epoch)
            self._engine.train_epoch(
                self._loader,
                epoch=self._epoch,
                seed=SEED,
                max_steps=last,
                on_steps=self._folder.append,
            )


class Plain:
    """The loop that most tutorials show."""

    def __init__(self, dataset: Dataset, data_dir: Path, *, batch_size: int) -> None:
        torch.manual_seed(SEED)
        self._batches = endless(
            plain_loader(dataset, data_dir, batch_size=batch_size, workers=PLAIN_WORKERS)
        )
        self._model = build_model("vgg11", len(dataset.class_names)).train()
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4
        )
        self.history: list[tuple[float, float]] = []

    def train(self, steps: int) -> None:
        """Train this number of steps; the epoch continues where the last call stopped."""
        for _ in range(steps):
            images, labels = next(self._batches)
            self._optimizer.zero_grad()
            outputs = self._model(images)
            loss = self._criterion(outputs, labels)
            loss.backward()
            self._optimizer.step()
            self.history.append(
                (loss.item(), accuracy_score(labels.numpy(), outputs.argmax(dim=1).numpy()))
            )


def serve_plain(pipe: Connection, arguments: argparse.Namespace) -> None:
    """Run the plain loop in this process.

    Receives numbers of steps from the pipe, trains them, and answers when they are done. The number
    0 ends the process.
    """
    torch.set_num_threads(arguments.threads)
    dataset = load_benchmark_dataset(
        arguments.dataset, arguments.data_dir, batch_size=arguments.batch_size, quiet=True
    )
    plain = Plain(dataset, arguments.data_dir, batch_size=arguments.batch_size)
    while steps := pipe.recv():
        plain.train(steps)
        pipe.send(steps)


class PlainProcess:
    """The plain loop in its own process; ``train`` returns when the steps are done."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._pipe, far = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve_plain, args=(far, arguments))
        self._process.start()
        far.close()

    def train(self, steps: int) -> None:
        """Train this number of steps; raise EOFError if the process has died."""
        self._pipe.send(steps)
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(0)
        self._process.join(timeout=30)


@dataclass(frozen=True)
class Round:
    """Seconds per step of both loops, and operations per second of the products around them."""

    ours: float
    plain: float
    sgemm: list[float]

    @property
    def ratio(self) -> float:
        """The plain loop's seconds per step over ours: above 1, our step is faster."""
        return self.plain / self.ours

    def share(
        self, batch_size: int, *, of: Callable[[list[float]], float] = statistics.median
    ) -> float:
        """Return our operations per second over sgemm's.

        The divisor is the round's median product, or its best with ``of=max``.
        """
        return 6 * VGG11_MACS * batch_size / self.ours / of(self.sgemm)


def sgemm_rates() -> list[float]:
    """Return the operations per second of a few products of large float32 matrices."""
    left, right = (torch.rand(_SGEMM_SIZE, _SGEMM_SIZE) for _ in range(2))
    out = torch.mm(left, right)
    rates = []
    for _ in range(_SGEMM_REPEATS):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        rates.append(2 * _SGEMM_SIZE**3 / (time.perf_counter() - began))
    return rates


def seconds_per_step(loop: Ours | PlainProcess, steps: int) -> float:
    """Return a block's wall seconds per step; it begins once the plain loop's workers are idle."""
    wait_until_idle()
    began = time.perf_counter()
    loop.train(steps)
    return (time.perf_counter() - began) / steps


def measure_round(ours: Ours, plain: PlainProcess, *, steps: int, plain_first: bool) -> Round:
    """Measure a block of each loop, and sgemm before, between and after them."""
    seconds: dict[Ours | PlainProcess, float] = {}
    wait_until_idle()
    sgemm = sgemm_rates()
    for loop in (plain, ours) if plain_first else (ours, plain):
        seconds[loop] = seconds_per_step(loop, steps)
        wait_until_idle()
        sgemm += sgemm_rates()
    return Round(seconds[ours], seconds[plain], sgemm)


def peak_memory_bytes(arguments: argparse.Namespace, dataset: str) -> int:
    """Return the peak resident memory of a real, short run of PartOne/main.py.

    The run trains, evaluates and writes its report. If it fails, ends the program with the end of
    the run's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output.txt"
        command = [
            sys.executable,
            str(REPOSITORY / "PartOne" / "main.py"),
            "--max-steps",
            str(_MEMORY_STEPS),
            "--batch-size",
            str(arguments.batch_size),
            "--threads",
            str(arguments.threads),
            "--dataset",
            dataset,
            "--data-dir",
            str(arguments.data_dir),
            "--output-dir",
            str(Path(folder) / "reports"),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(
                f"error: {' '.join(command)} ended with "
                f"{process.returncode}:\n{log.read_text()[-2000:]}"
            )
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


FLAGS: dict[str, dict[str, Any]] = {
    **DATA_FLAGS,
    "--rounds": {
        "type": whole_number,
        "default": 6,
        "help": "blocks of each loop (default: 6)",
    },
    "--steps-per-round": {
        "type": whole_number,
        "default": 8,
        "help": "steps per block (default: 8)",
    },
    "--threads": {
        "type": whole_number,
        "default": usable_cores(),
        "help": "torch's threads, for both loops (default: all usable cores)",
    },
}


def report(rounds: list[Round], *, batch_size: int, peak_bytes: int) -> None:
    """Print the summary of all rounds."""
    shares = [100 * r.share(batch_size) for r in rounds]
    shares_of_best = [100 * r.share(batch_size, of=max) for r in rounds]
    print(f"\nmedian (minimum to maximum) over {len(rounds)} rounds")
    print(f"ours, seconds per step     {spread([r.ours for r in rounds], '.3f')}")
    print(f"plain, seconds per step    {spread([r.plain for r in rounds], '.3f')}")
    print(f"plain / ours               {spread([r.ratio for r in rounds], '.3f')}")
    print(
        "sgemm, GFLOP/s             "
        f"{spread([rate / 1e9 for r in rounds for rate in r.sgemm], '.0f')}"
    )
    print(f"ours, % of sgemm           {spread(shares, '.1f')}")
    print(f"ours, % of a round's best  {spread(shares_of_best, '.1f')}")
    print(
        f"ours, peak memory          {peak_bytes / 1e9:.2f} GB (a run of PartOne/main.py, "
        f"{_MEMORY_STEPS} steps)"
    )


def main() -> None:
    """Measure and print."""
    arguments = parse_flags(__doc__, FLAGS)
    size, steps = arguments.batch_size, arguments.steps_per_round
    torch.set_num_threads(arguments.threads)
    tune_malloc()  # as run() does
    print(describe_machine())
    print(
        f"settings: batch {size}, {arguments.threads} thread{'s' * (arguments.threads > 1)}, "
        f"{arguments.rounds} rounds of "
        f"{steps} steps after {_WARM_UP_STEPS} to warm up; plain: {PLAIN_WORKERS} workers; "
        f"sgemm: {_SGEMM_SIZE} x {_SGEMM_SIZE}"
    )
    dataset = load_benchmark_dataset(arguments.dataset, arguments.data_dir, batch_size=size)
    peak_bytes = peak_memory_bytes(arguments, dataset.name)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(
            dataset,
            Path(folder),
            batch_size=size,
            total_steps=_WARM_UP_STEPS + arguments.rounds * steps,
        )
        plain = PlainProcess(arguments)
        plain.train(_WARM_UP_STEPS)
        wait_until_idle()
        ours.train(_WARM_UP_STEPS)
        print(
            f"\n{'round':<7}{'first':<8}{'ours s/step':<13}{'plain s/step':<14}{'plain/ours':<12}"
            f"{'sgemm GFLOP/s':<15}ours % of sgemm",
            flush=True,
        )
        for number in range(1, arguments.rounds + 1):
            plain_first = number % 2 == 0
            r = measure_round(ours, plain, steps=steps, plain_first=plain_first)
            rounds.append(r)
            print(
                f"{number:<7}{'plain' if plain_first else 'ours':<8}"
                f"{r.ours:<13.3f}{r.plain:<14.3f}{r.ratio:<12.3f}"
                f"{statistics.median(r.sgemm) / 1e9:<15.0f}{100 * r.share(size):.1f}",
                flush=True,
            )
        plain.close()
    report(rounds, batch_size=size, peak_bytes=peak_bytes)


if __name__ == "__main__":
    main()
