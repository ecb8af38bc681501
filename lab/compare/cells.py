"""The cells of a comparison (which strategy on how many nodes), its runs, and the command of each.

``plan_cells`` lists the cells and ``in_turns`` their runs in order. ``node_command`` is what a
student would type on each node.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, count
from common.sync import BUILT_IN, is_exact
from common.utils.paths import part_command
from lab.compare.settings import Settings
from lab.units import AUTO, split_variant

# The file in which a comparison keeps its profile of emulated compute.
PROFILE = "profile.json"


@dataclass(frozen=True)
class Run:
    """A repeat (from 0) of a cell, by its ``number`` in the comparison.

    No other run writes to ``path`` and ``logs``.
    """

    folder: Path
    settings: Settings
    cell: dict[str, Any]
    repeat: int
    number: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the run in its comparison."""
        return self.cell["id"], self.repeat

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return int(self.cell["nodes"])

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return self.settings.seeds_to_run[self.repeat]

    @property
    def title(self) -> str:
        """For a person, e.g. "ring on 2 nodes at 1gbit, repeat 1"."""
        at = "" if self.cell["rate"] is None else f" at {self.cell['rate']}"
        return f"{self.cell['sync']} on {count(self.nodes, 'node')}{at}, repeat {self.repeat + 1}"

    @property
    def path(self) -> Path:
        """The folder in which rank 0 writes what it measured, e.g. PartThree-ddp/auto-n2-1."""
        strategy, _ = split_variant(self.cell["sync"])
        name = self.cell["id"].removeprefix(f"{strategy}-") + f"-{self.repeat + 1}"
        return self.folder / "runs" / f"{part_of(strategy)}-{strategy}" / name

    @property
    def logs(self) -> Path:
        """The folder of the ranks' output."""
        return self.folder / "logs" / f"{self.cell['id']}-{self.repeat + 1}"


def plan_cells(settings: Settings, *, cores: float = math.inf) -> list[dict[str, Any]]:
    """Return the cells without repeats: one node, then each strategy at each rate on more.

    cores : those that the ranks of a cell share, if they do.
    """
    weak = settings.scaling == "weak"
    cells = [
        new_cell(sync, nodes, rate=rate, batch_size=settings.batch_size * (nodes if weak else 1))
        | {"oversubscribed": nodes > cores}
        for nodes in sorted(set(settings.nodes))
        for rate in (settings.rates if nodes > 1 else (None,))
        for sync in (settings.sync if nodes > 1 else ("none",))
        if nodes == 1 or sync != "none"
    ]
    if not cells:
        raise UserError(
            "--sync none runs on one node only, so there is nothing to compare on "
            f"{' and '.join(map(str, settings.nodes))} nodes: add a strategy, or 1 to --nodes"
        )
    return cells


def new_cell(sync: str, nodes: int, *, batch_size: int, rate: str | None = None) -> dict[str, Any]:
    """Return a cell without repeats, as lab/compare/results.py documents it."""
    return {
        "id": f"{sync}-{cell_suffix(nodes, rate)}",
        "sync": sync,
        "nodes": nodes,
        "rate": rate,
        "batch_size": batch_size,
        "exact": is_exact(split_variant(sync)[0]),
        "group": 0,
        "oversubscribed": False,
        "status": "pending",
        "message": None,
        "repeats": [],
        "median": None,
        "interval": None,
    }


def choose_buckets(results: dict[str, Any]) -> list[str]:
    """Give each cell of "ddp-auto" and its like the buckets that its prediction has chosen.

    Returns a line for each such cell. Raises UserError if one has no prediction.
    """
    predicted = (results["prediction"] or {"cells": {}})["cells"]
    automatic = [cell for cell in results["cells"] if split_variant(cell["sync"])[1] == AUTO]
    for cell in automatic:
        if cell["id"] not in predicted:
            raise UserError(
                f"--sync {cell['sync']}: the prediction chooses its buckets, and there is none: "
                "leave out --no-predict, and for a plan run `lab calibrate` first"
            )
        cell["bucket_mb"] = predicted[cell["id"]]["bucket_mb"]
    return [
        f"{cell['id']}: the event model chooses buckets of "
        + ("the default sizes" if cell["bucket_mb"] is None else f"{cell['bucket_mb']:g} MiB")
        for cell in automatic
    ]


def in_turns(folder: Path, settings: Settings, cells: Sequence[dict[str, Any]]) -> list[Run]:
    """Return all runs: each cell once, then each again in the opposite order, and so on.

    So a drift of the machine affects all cells alike.
    """
    turns = [
        (cell, repeat)
        for repeat in range(len(settings.seeds_to_run))
        for cell in (cells if repeat % 2 == 0 else reversed(cells))
    ]
    return [Run(folder, settings, *turn, number) for number, turn in enumerate(turns)]


def cell_suffix(nodes: int, rate: str | None) -> str:
    """Return the part of a file's name for the number of nodes and the rate, e.g. "n2-1gbit"."""
    return f"n{nodes}" + ("" if rate is None else "-" + re.sub(r"[^a-z0-9.]", "", rate.lower()))


def part_of(sync: str) -> str:
    """Return the part that offers a strategy, whatever the size of its buckets."""
    if sync == "none":
        return "PartOne"
    return "PartThree" if split_variant(sync)[0] in BUILT_IN else "PartTwo"


def node_command(run: Run) -> list[str]:
    """Return what follows ``python`` on each node, without address, number of nodes and rank."""
    settings, (sync, bucket_mb) = run.settings, split_variant(run.cell["sync"])
    size = run.cell["bucket_mb"] if bucket_mb == AUTO else bucket_mb
    length: tuple[object, ...] = ("--max-steps", settings.total_steps, "--measure-only")
    if settings.until_accuracy is not None:
        length = (
            *("--epochs", settings.epochs, "--target-accuracy", settings.until_accuracy),
            *("--patience", 1, "--keep-checkpoints", 1),
        )
    command = [
        *part_command(part_of(sync)),
        *([] if sync in ("none", "ddp") else ["--sync", sync]),
        *("--dataset", settings.dataset, "--model", settings.model),
        *("--batch-size", run.cell["batch_size"], "--seed", run.seed),
        *("--output-dir", run.path.parent.parent, "--run-name", run.path.name),
        *("--untimed-steps", settings.warmup, "--timeline", *length),
        *(["--compute", run.folder / PROFILE] if settings.emulated else []),
        "--no-amp",  # else PartThree alone would take fp16 on a GPU; --amp in the flags wins
        *settings.flags,
        *([] if size is None else ["--bucket-mb", size]),  # the last one counts
    ]
    return list(map(str, command))
