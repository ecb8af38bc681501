"""Writes records of ranks that never ran: what a probe would have written, with real numbers.

``Writer`` holds one process's records; ``train`` writes those of a small training, in which
``exchange`` says what each rank's optimiser gets from the gradients of all ranks.
"""

import json
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lab.audit.recording import read_recording

Numbers = NDArray[np.float64]
Exchange = Callable[[Numbers, int], Numbers]
"""From the ranks' own gradients (ranks, columns) and the step to what each optimiser gets."""
SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "fc.bias": (10,)}
COLUMNS = sum(int(np.prod(shape)) for shape in SHAPES.values())


class Writer:
    """The records of one process; each takes a millisecond."""

    def __init__(self, folder, pid):
        self._lines, self._numbers = folder / f"{pid}.jsonl", folder / f"{pid}.f64"
        self._time = 0.0
        self.record("start", pid=pid, ppid=1, hint=None, variables={}, torch="2.15")

    def record(self, kind, **fields):
        """Write one record."""
        self._time += 1e-3
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"k": kind, "t": self._time, **fields}) + "\n")

    def numbers(self, values):
        """Write numbers and return the reference to them."""
        content = np.asarray(values, dtype=np.float64)
        with self._numbers.open("ab") as file:
            content.tofile(file)
            return [file.tell() // 8 - len(content), len(content)]


def gradients(rank, step, columns=COLUMNS):
    """Return a rank's own gradient of a step as float32 would hold it: correlated over ranks."""
    common = np.random.default_rng([7, step]).standard_normal(columns)
    own = np.random.default_rng([rank, step]).standard_normal(columns)
    return np.asarray((common + own).astype(np.float32), dtype=np.float64)


def mean(own, step):
    """Return the right exchange's result, rounded to float32."""
    total = own.astype(np.float32).sum(axis=0) / np.float32(len(own))
    return np.repeat(total[None].astype(np.float64), len(own), axis=0)


def train(
    folder,
    exchange=mean,
    *,
    size=3,
    steps=4,
    own=gradients,
    after=lambda weights, step: weights,
    start=lambda rank: np.linspace(-1, 1, COLUMNS),
    rates=lambda rank: 0.1,
    edit=lambda kind, rank, fields: None,
    ddp=False,
    group=True,
    dtype="float32",
):
    """Write a training by SGD and return its recording.

    Parameters
    ----------
    after : changes the weights (ranks, columns) after the update of a step.
    edit : changes the fields of a record before it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers = [Writer(folder, 1000 + rank) for rank in range(size)]

    def write(kind, rank, /, **fields):
        edit(kind, rank, fields)
        writers[rank].record(kind, **fields)

    rows = [
        [f"0.0.{index}", name, list(shape), dtype, int(np.prod(shape)), index]
        for index, (name, shape) in enumerate(SHAPES.items())
    ]
    for rank in range(size):
        if group:
            write("group", rank, rank=rank, world=size, backend="gloo", at=None)
        if ddp:
            write("ddp", rank, parameters=4, bytes=4 * COLUMNS, at=None)
        write("params", rank, o=0, optimizer="SGD", built=0, rows=rows)
    weights = np.array([start(rank) for rank in range(size)])
    by_rank = np.array([[rates(rank)] for rank in range(size)])
    loss = {"value": 2.3, "node": "NllLossBackward0", "reduction": "mean", "arriving": 1.0}
    passed = {"micro": 0, "forwards": [[8, 0, "ddp" if ddp else "module", "Net"]], "seconds": 0.1}
    passed |= {"loss": loss | {"samples": 8, "target_hash": 0}, "exposed_seconds": 0.0}
    called = {"name": "all_reduce", "content": "gradient", "op": "sum", "size": size, "shape": [10]}
    called |= {"bytes": 4 * COLUMNS, "within": None, "at": ["main.py", 9, "ar"]}
    for step in range(steps + 1):
        for rank in range(size):
            values = writers[rank].numbers(weights[rank])
            write("weights", rank, o=0, step=step, values=values)
        if step == steps:
            break
        mine = np.array([own(rank, step) for rank in range(size)])
        got = exchange(mine, step)
        for rank in range(size):
            write("backward", rank, step=step, **passed, at=["main.py", 8, "loss.backward()"])
            if group and not ddp:
                write("call", rank, c=step, step=step, **called)
            numbers = {"own": mine[rank], "got": got[rank]}
            fields = {key: writers[rank].numbers(numbers[key]) for key in numbers}
            fields |= {f"{key}_norm": float(np.linalg.norm(numbers[key])) for key in numbers}
            fields |= {"lr": [rates(rank)], "settings": {"lr": rates(rank), "momentum": 0}}
            fields |= {"optimizer": "SGD", "micro": 1, "sent": None, "scale": 1, "clips": []}
            write("step", rank, o=0, step=step, **fields)
            write("stepped", rank, o=0, step=step, seconds=0.1, state=None)
        weights = after(weights - by_rank * got, step)
    return read_recording(folder)
