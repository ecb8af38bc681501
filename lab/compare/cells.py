"""The cells of a comparison (which strategy on how many nodes), its runs, and the command of each.

``plan_cells`` lists the cells and ``in_turns`` their runs in order. ``node_command`` is what a
student would type on each node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from common.errors import UserError
from common.say import count, counts
from common.sync import BUILT_IN, plan_class
from common.sync.plans.base import AUTO
from common.utils.paths import part_command
from lab.compare.settings import Settings
from lab.comparison.cell import new_cell
from lab.comparison.record import Cell, Prediction
from lab.predict.variants import split_variant

# The file in which a comparison keeps its profile of emulated compute.
PROFILE = "profile.json"


@dataclass(frozen=True)
class Run:
    """A repeat (from 0) of a cell, by its ``number`` in the comparison.

    No other run writes to ``path`` and ``logs``.
    """

    folder: Path
    settings: Settings
    cell: Cell
    repeat: int
    number: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the run in its comparison."""
        return self.cell.id, self.repeat

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.cell.nodes

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.cell.ranks

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return self.settings.seeds_to_run[self.repeat]

    @property
    def title(self) -> str:
        """For a person, e.g. "ring on 2 ranks, repeat 1"; with a rate each has an emulated node."""
        place = "rank" if self.cell.rate is None else "node"
        name = f"{self.cell.sync} on {count(self.nodes, place)}"
        if self.cell.ranks_per_node > 1:
            name += f" with {self.cell.ranks_per_node} ranks each"
        if self.cell.rate is not None:
            name += f" at {self.cell.rate}"
        return f"{name}, repeat {self.repeat + 1}"

    @property
    def path(self) -> Path:
        """The folder in which rank 0 writes what it measured, e.g. PartThree-ddp/auto-n2-1."""
        strategy, _ = split_variant(self.cell.sync)
        name = self.cell.id.removeprefix(f"{strategy}-")
        part = f"{part_of(strategy)}-{strategy}"
        return self.folder / "runs" / part / f"{name}-{self.repeat + 1}"

    @property
    def logs(self) -> Path:
        """The folder of the ranks' output."""
        return self.folder / "logs" / f"{self.cell.id}-{self.repeat + 1}"


def plan_cells(settings: Settings, *, cores: float = math.inf) -> list[Cell]:
    """Return the cells without repeats: one node, then each strategy at each rate on more.

    cores : those that the ranks of a cell share, if they do.
    """
    cells = []
    for nodes in sorted(set(settings.nodes)):
        if nodes == 1:
            cells.append(new_cell("none", 1, batch_size=settings.batch_size))
            continue
        batch_size = settings.batch_size
        if settings.scaling == "weak":
            batch_size *= settings.ranks_on(nodes)
        cells += [
            new_cell(
                sync,
                nodes,
                rate=rate,
                batch_size=batch_size,
                ranks_per_node=settings.ranks_per_node,
            )
            for rate in settings.rates
            for sync in settings.sync
            if sync != "none"
        ]
    if not cells:
        raise UserError(
            "--sync none runs on one rank only, so there is nothing to compare on "
            f"{counts(settings.nodes, 'rank')}: add a strategy, or 1 to --nodes"
        )
    for cell in cells:
        cell.oversubscribed = cell.ranks > cores
    return cells


def choose_buckets(cells: Sequence[Cell], prediction: Prediction | None) -> list[str]:
    """Give each cell of "ddp-auto" and its like the buckets that its prediction has chosen.

    Returns a line for each such cell. Raises UserError if one has no prediction.
    """
    lines = []
    for cell in cells:
        _, size = split_variant(cell.sync)
        if size != AUTO:
            continue
        if prediction is None or cell.id not in prediction.cells:
            raise UserError(
                f"--sync {cell.sync}: the prediction chooses its buckets, and there is none: "
                "leave out --no-predict, and for a plan run `lab calibrate` first"
            )
        cell.bucket_mb = prediction.cells[cell.id].bucket_mb
        chosen = "the default sizes"
        if cell.bucket_mb is not None:
            chosen = f"{cell.bucket_mb:g} MiB"
        lines.append(f"{cell.id}: the event model chooses buckets of {chosen}")
    return lines


def in_turns(folder: Path, settings: Settings, cells: Sequence[Cell]) -> list[Run]:
    """Return all runs: each cell once, then each again in the opposite order, and so on.

    So a drift of the machine affects all cells alike.
    """
    runs: list[Run] = []
    for repeat in range(len(settings.seeds_to_run)):
        turn = cells if repeat % 2 == 0 else cells[::-1]
        for cell in turn:
            runs.append(Run(folder, settings, cell, repeat, number=len(runs)))
    return runs


def part_of(sync: str) -> str:
    """Return the part that offers a strategy, whatever the size of its buckets."""
    if sync == "none":
        return "PartOne"
    strategy, _ = split_variant(sync)
    return "PartThree" if strategy in BUILT_IN else "PartTwo"


def node_command(run: Run) -> list[str]:
    """Return what follows ``python`` on each node, without address, number of nodes and rank."""
    settings = run.settings
    sync, bucket_mb = split_variant(run.cell.sync)
    command: list[object] = [*part_command(part_of(sync))]
    if sync not in ("none", "ddp"):
        command += ["--sync", sync]
    if any(option.name == "ranks_per_node" for option in plan_class(sync).options()):
        command += ["--ranks-per-node", settings.ranks_per_node]
    command += [
        *("--dataset", settings.dataset, "--model", settings.model),
        *("--batch-size", run.cell.batch_size, "--seed", run.seed),
        *("--output-dir", run.path.parent.parent, "--run-name", run.path.name),
        *("--untimed-steps", settings.warmup, "--timeline"),
    ]
    if settings.until_accuracy is None:
        command += ["--max-steps", settings.total_steps, "--measure-only"]
    else:
        command += [
            *("--epochs", settings.epochs, "--target-accuracy", settings.until_accuracy),
            *("--patience", 1, "--keep-checkpoints", 1),
        ]
    if settings.emulated:
        command += ["--compute", run.folder / PROFILE]
    # Without --no-amp, PartThree alone would take fp16 on a GPU; --amp in the flags wins.
    command += ["--no-amp", *settings.flags]
    if bucket_mb == AUTO:
        assert run.cell.bucket_mb is not UNSET  # choose_buckets comes first
        bucket_mb = run.cell.bucket_mb
    if bucket_mb is not None:
        command += ["--bucket-mb", bucket_mb]  # the last one counts
    return list(map(str, command))
