"""The cells of a comparison (which strategy on how many nodes), its runs, and the command of each.

``plan_cells`` lists the cells and ``in_turns`` their runs in order. ``node_command`` is what a
student would type on each node.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.sync import BUILT_IN, STRATEGIES, is_exact
from common.utils.paths import part_command
from lab.units import parse_rate

_STRATEGY_FLAGS = {
    "--bucket-mb": float,
    "--topk-ratio": float,
    "--powersgd-rank": int,
    "--averaging-period": int,
}
_AVERAGING_PERIOD = 4  # the default of local_sgd


@dataclass(frozen=True)
class Settings:
    """What a comparison measures. An interrupted comparison resumes if its settings are equal.

    ``batch_size`` is global with "strong" scaling, of one node with "weak". ``steps`` are measured,
    after ``warmup`` others. With ``until_accuracy`` each of ``seeds`` trains once, for at most
    ``epochs`` epochs; else the first seed trains ``repeats`` times. ``rates`` are of the nodes'
    links, such as "200mbit", each on its own cluster; none: over loopback. ``compute`` is "real" or
    a profile of emulated compute, as for the parts. Every run gets ``flags`` unchanged.
    """

    nodes: tuple[int, ...]
    sync: tuple[str, ...]
    steps: int = 30
    warmup: int = 5
    repeats: int = 3
    dataset: str = "cifar10"
    model: str = "vgg11"
    batch_size: int = 256
    scaling: str = "strong"
    seeds: tuple[int, ...] = (0,)
    until_accuracy: float | None = None
    epochs: int = 20
    flags: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    compute: str = "real"

    def __post_init__(self) -> None:
        counts = {
            "--nodes": self.nodes,
            "--steps": (self.steps,),
            "--warmup": (self.warmup,),
            "--repeats": (self.repeats,),
            "--batch-size": (self.batch_size,),
            "--epochs": (self.epochs,),
        }
        for flag, values in counts.items():
            if not values or min(values) < 1:
                raise UserError(
                    f"{flag}: got {' '.join(map(str, values)) or 'nothing'}, give whole numbers "
                    "of at least 1"
                )
        unknown = [name for name in self.sync if name not in STRATEGIES]
        rules = (
            (
                not unknown,
                f"--sync: got {', '.join(unknown)}; choose from {', '.join(STRATEGIES)}, or 'all' "
                "or 'exact'",
            ),
            (
                self.scaling == "weak" or max(self.nodes) <= self.batch_size,
                f"--nodes: got {max(self.nodes)}, more than the {self.batch_size} samples of a "
                "global batch: give fewer nodes or a larger --batch-size",
            ),
            (
                self.until_accuracy is None or 0 < self.until_accuracy <= 1,
                f"--until-accuracy: got {self.until_accuracy}, give a fraction above 0 and of at "
                "most 1, e.g. 0.6",
            ),
            (
                len({parse_rate(rate) for rate in self.rates}) == len(self.rates),
                f"--rate: got {' '.join(self.rates)}, the same twice: give each rate once",
            ),
            (
                not self.emulated or self.until_accuracy is None,
                f"--compute {self.compute} learns nothing, so there is no accuracy to reach: "
                "leave out --until-accuracy, or --compute",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise UserError(message)

    @property
    def emulated(self) -> bool:
        """Whether layers sleep instead of computing."""
        return self.compute != "real"

    @property
    def seeds_to_run(self) -> tuple[int, ...]:
        """The seed of each repeat."""
        return self.seeds if self.until_accuracy is not None else self.seeds[:1] * self.repeats

    @property
    def total_steps(self) -> int:
        """Steps of each run without ``until_accuracy``. The last ones record the timeline.

        All strategies take equally many, since the learning rate depends on their number.
        """
        period = self.strategy_options.get("averaging_period", _AVERAGING_PERIOD)
        return self.warmup + self.steps + (period if "local_sgd" in self.sync else 1)

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The strategies' options among the flags, by the names of the strategies' arguments."""
        options: dict[str, Any] = {}
        for flag, value in pairwise(self.flags):
            if flag in _STRATEGY_FLAGS:
                with contextlib.suppress(ValueError):  # the part itself reports a wrong value
                    options[flag[2:].replace("-", "_")] = _STRATEGY_FLAGS[flag](value)
        return options

    def as_json(self) -> dict[str, Any]:
        """Plain values, as they come back from a JSON file."""
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return values | {"rates": [*(self.rates or (None,))]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """The settings with these values of ``as_json``; other keys are ignored."""
        known = {field.name: values[field.name] for field in fields(cls)}
        known["rates"] = [rate for rate in known["rates"] if rate is not None]
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in known.items()
        }
        return cls(**arguments)


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
        plural = "s" if self.nodes > 1 else ""
        return f"{self.cell['sync']} on {self.nodes} node{plural}{at}, repeat {self.repeat + 1}"

    @property
    def path(self) -> Path:
        """The folder in which rank 0 writes what it measured."""
        strategy = f"{part_of(self.cell['sync'])}-{self.cell['sync']}"
        run = f"{cell_suffix(self.nodes, self.cell['rate'])}-{self.repeat + 1}"
        return self.folder / "runs" / strategy / run

    @property
    def logs(self) -> Path:
        """Folder of the ranks' output, or the first part of its files' names."""
        return self.folder / "logs" / f"{self.cell['id']}-{self.repeat + 1}"


def plan_cells(settings: Settings) -> list[dict[str, Any]]:
    """Return the cells without repeats: one node, then each strategy at each rate on more."""
    rates: Sequence[str | None] = settings.rates or (None,)
    turns = [
        (sync, nodes, rate)
        for nodes in sorted(set(settings.nodes))
        for rate in (rates if nodes > 1 else (None,))
        for sync in (settings.sync if nodes > 1 else ("none",))
        if (sync == "none") == (nodes == 1)
    ]
    weak = settings.scaling == "weak"
    cells = [
        new_cell(sync, nodes, rate=rate, batch_size=settings.batch_size * (nodes if weak else 1))
        for sync, nodes, rate in turns
    ]
    if not cells:
        raise UserError(
            "--sync none is one node's; there is nothing to compare on "
            f"{' and '.join(map(str, settings.nodes))} nodes: add a strategy, or 1 to --nodes"
        )
    return cells


def new_cell(
    sync: str, nodes: int, *, batch_size: int, rate: str | None = None, group: int = 0
) -> dict[str, Any]:
    """Return a cell without repeats, as lab/compare/results.py documents it."""
    return {
        "id": f"{sync}-{cell_suffix(nodes, rate)}" + (f"-g{group}" if group else ""),
        "sync": sync,
        "nodes": nodes,
        "rate": rate,
        "batch_size": batch_size,
        "exact": is_exact(sync),
        "group": group,
        "oversubscribed": False,
        "status": "pending",
        "message": None,
        "repeats": [],
        "median": None,
        "interval": None,
    }


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
    """Return the part that offers a strategy."""
    if sync == "none":
        return "PartOne"
    return "PartThree" if sync in BUILT_IN else "PartTwo"


def node_command(run: Run) -> list[str]:
    """Return what follows ``python`` on each node, without address, number of nodes and rank."""
    settings, sync = run.settings, run.cell["sync"]
    timed = settings.until_accuracy is None
    flags = {
        "--sync": None if sync in ("none", "ddp") else sync,
        "--dataset": settings.dataset,
        "--model": settings.model,
        "--batch-size": run.cell["batch_size"],
        "--seed": run.seed,
        "--untimed-steps": settings.warmup,
        "--output-dir": run.path.parent.parent,
        "--run-name": run.path.name,
        "--max-steps": settings.total_steps if timed else None,
        "--epochs": None if timed else settings.epochs,
        "--target-accuracy": settings.until_accuracy,
        "--patience": None if timed else 1,
        "--keep-checkpoints": None if timed else 1,
        "--compute": profile_file(run.folder) if settings.emulated else None,
    }
    given = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    switches = ["--timeline", "--measure-only"] if timed else ["--timeline"]
    return [*part_command(part_of(sync)), *chain(*given), *switches, *settings.flags]


def profile_file(folder: Path) -> Path:
    """Return where a comparison keeps its profile of emulated compute."""
    return folder / "profile.json"
