"""Writes records of ranks that never ran: what a probe would have written, with real numbers.

``Writer`` holds one process's records; ``train`` writes those of a small training, in which
``exchange`` says what each rank's optimiser gets from the gradients of all ranks.
"""

import json
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.audit.recording import Recording, read_recording

Numbers = NDArray[np.float64]
SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "fc.bias": (10,)}
COLUMNS = sum(int(np.prod(shape)) for shape in SHAPES.values())


class Writer:
    """The records of one process."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._lines, self._numbers = folder / f"{pid}.jsonl", folder / f"{pid}.f64"
        self._count, self._time = 0, 0.0
        self._lines.touch()
        self.record("start", pid=pid, ppid=1, hint=None, variables={}, torch="2.15")

    def record(self, kind: str, **fields: Any) -> None:
        """Write one record; the clock advances by a millisecond."""
        self._time += 1e-3
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"k": kind, "t": self._time, **fields}) + "\n")

    def numbers(self, values: Iterable[float]) -> list[int]:
        """Write numbers and return the reference to them."""
        content = array("d", values)
        with self._numbers.open("ab") as file:
            content.tofile(file)
        self._count += len(content)
        return [self._count - len(content), len(content)]


def params_rows(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> list[list[Any]]:
    """Return the rows of a params record for whole parameters of optimiser 0."""
    rows = []
    for index, (name, shape) in enumerate(shapes.items()):
        numel = int(np.prod(shape))
        rows.append([f"0.0.{index}", name, list(shape), dtype, numel, 0, numel])
    return rows


def gradients(rank: int, step: int, columns: int = COLUMNS) -> Numbers:
    """Return a rank's own gradient of a step as float32 would hold it: correlated over ranks."""
    common = np.random.default_rng([7, step]).standard_normal(columns)
    own = np.random.default_rng([rank, step]).standard_normal(columns)
    return np.asarray((common + own).astype(np.float32), dtype=np.float64)


Exchange = Callable[[Numbers, int], Numbers]
"""From the ranks' own gradients (ranks, columns) and the step to what each optimiser gets."""


def mean(own: Numbers, step: int) -> Numbers:
    """Return the right exchange's result, rounded to float32."""
    total = own.astype(np.float32).sum(axis=0) / np.float32(len(own))
    return np.repeat(total[None].astype(np.float64), len(own), axis=0)


def train(
    folder: Path,
    exchange: Exchange = mean,
    *,
    size: int = 3,
    steps: int = 4,
    own: Callable[[int, int], Numbers] = gradients,
    after: Callable[[Numbers, int], Numbers] = lambda weights, step: weights,
    start: Callable[[int], Numbers] = lambda rank: np.linspace(-1, 1, COLUMNS),
    rates: Callable[[int], float] = lambda rank: 0.1,
    edit: Callable[[str, int, dict[str, Any]], None] = lambda kind, rank, fields: None,
    ddp: bool = False,
    group: bool = True,
    dtype: str = "float32",
) -> Recording:
    """Write a training by SGD and return its recording.

    Parameters
    ----------
    after : changes the weights (ranks, columns) after the update of a step.
    edit : changes the fields of a record before it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers = [Writer(folder, 1000 + rank) for rank in range(size)]

    def write(kind: str, rank: int, /, **fields: Any) -> None:
        edit(kind, rank, fields)
        writers[rank].record(kind, **fields)

    for rank in range(size):
        if group:
            write("group", rank, rank=rank, world=size, backend="gloo", at=None)
        if ddp:
            write("ddp", rank, parameters=4, bytes=4 * COLUMNS, at=None)
        write("params", rank, o=0, optimizer="SGD", rows=params_rows(SHAPES, dtype))
    weights = np.array([start(rank) for rank in range(size)])
    for step in range(steps):
        mine = np.array([own(rank, step) for rank in range(size)])
        got = exchange(mine, step)
        for rank in range(size):
            numbers = writers[rank].numbers
            write("weights", rank, o=0, step=step, values=numbers(weights[rank]))
            write("backward", rank, **_backward(step, "ddp" if ddp else "module"))
            if group and not ddp:
                call = {"name": "all_reduce", "content": "gradient", "step": step, "c": step}
                write(
                    "call",
                    rank,
                    **call,
                    op="sum",
                    size=size,
                    bytes=4 * COLUMNS,
                    at=["main.py", 9, "ar"],
                )
            fields = _step(step, mine[rank], got[rank], rates(rank))
            fields |= {"own": numbers(mine[rank]), "got": numbers(got[rank])}
            write("step", rank, **fields)
            write("stepped", rank, o=0, step=step, seconds=0.1, state=None)
        weights = weights - np.array([[rates(rank)] for rank in range(size)]) * got
        weights = after(weights, step)
    for rank in range(size):
        values = writers[rank].numbers(weights[rank])
        write("weights", rank, o=0, step=steps, values=values)
    return read_recording(folder)


def _backward(step: int, through: str) -> dict[str, Any]:
    loss = {"value": 2.3, "node": "NllLossBackward0", "reduction": "mean", "arriving": 1.0}
    return {
        "step": step,
        "micro": 0,
        "forwards": [[8, 0, through, "Net"]],
        "loss": loss | {"samples": 8, "target_hash": 0},
        "seconds": 0.1,
        "exposed_seconds": 0.0,
        "at": ["main.py", 8, "loss.backward()"],
    }


def _step(step: int, own: Numbers, got: Numbers, rate: float) -> dict[str, Any]:
    return {
        "o": 0,
        "step": step,
        "optimizer": "SGD",
        "micro": 1,
        "sent": None,
        "own_norm": float(np.linalg.norm(own)),
        "got_norm": float(np.linalg.norm(got)),
        "lr": [rate],
        "settings": {"lr": rate, "momentum": 0},
        "scale": 1,
        "clips": [],
    }
