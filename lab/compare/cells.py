"""The cells of a comparison: which strategy on how many nodes, with which command each of its nodes is started.

``plan_cells`` lists them, ``in_turns`` their runs in order; ``node_command`` is just what a student would type on each node, and
what ``lab compare`` runs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.sync import BUILT_IN, STRATEGIES, is_exact
from common.utils.paths import part_command
from lab.units import parse_rate

SCALINGS = ("strong", "weak")
_STRATEGY_FLAGS = {
    "--bucket-mb": float,
    "--topk-ratio": float,
    "--powersgd-rank": int,
    "--averaging-period": int,
}


@dataclass(frozen=True)
class Settings:
    """What a comparison asks for; with equal settings an interrupted comparison resumes.

    ``batch_size`` is global with "strong" scaling, of one node with "weak". ``steps`` are measured, after ``warmup`` others.
    With ``until_accuracy`` there is one training for each of ``seeds``, of at most ``epochs`` epochs; else ``repeats`` of the
    first seed. ``rates`` are those of the nodes' links, such as "200mbit", each on a cluster of its own; none: over loopback.
    ``compute`` is as of the parts: "real", or whose times emulated compute takes. ``flags`` go to every run as they are.
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
        unknown = [name for name in self.sync if name not in STRATEGIES]
        if unknown:
            raise UserError(
                f"--sync: got {', '.join(unknown)}; choose from {', '.join(STRATEGIES)}, or 'all' or 'exact'"
            )
        for name, values, least in (
            ("--nodes", self.nodes, 1),
            ("--steps", [self.steps], 1),
            ("--warmup", [self.warmup], 1),
            ("--repeats", [self.repeats], 1),
            ("--batch-size", [self.batch_size], 1),
            ("--epochs", [self.epochs], 1),
        ):
            if not values or min(values) < least:
                raise UserError(
                    f"{name}: got {' '.join(map(str, values)) or 'nothing'}, give whole numbers of at least {least}"
                )
        if self.scaling == "strong" and max(self.nodes) > self.batch_size:
            raise UserError(
                f"--nodes: got {max(self.nodes)}, more than the {self.batch_size} samples of a global batch: give "
                "fewer nodes or a larger --batch-size"
            )
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise UserError(
                f"--until-accuracy: got {self.until_accuracy}, give a fraction above 0 and of at most 1, e.g. 0.6"
            )

        if len({parse_rate(rate) for rate in self.rates}) < len(self.rates):
            raise UserError(
                f"--rate: got {' '.join(self.rates)}, the same twice: give each rate once"
            )
        if self.emulated and self.until_accuracy is not None:
            raise UserError(
                f"--compute {self.compute} learns nothing, so there is no accuracy to reach: leave out "
                "--until-accuracy, or --compute"
            )

    @property
    def emulated(self) -> bool:
        """Whether layers sleep in place of computing."""
        return self.compute != "real"

    @property
    def seeds_to_run(self) -> tuple[int, ...]:
        """The seed of each repeat."""
        return self.seeds if self.until_accuracy is not None else self.seeds[:1] * self.repeats

    @property
    def total_steps(self) -> int:
        """Steps of each run that is not ``until_accuracy``: the last ones are for the timeline. The same for all strategies, so
        that their learning rates are."""
        return (
            self.warmup + self.steps + (self._averaging_period if "local_sgd" in self.sync else 1)
        )

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The options of strategies among the flags, by the names of the strategies' arguments."""
        return {
            flag[2:].replace("-", "_"): _STRATEGY_FLAGS[flag](value)
            for flag, value in pairwise(self.flags)
            if flag in _STRATEGY_FLAGS
        }

    @property
    def _averaging_period(self) -> int:
        for flag, value in pairwise(self.flags):
            if flag == "--averaging-period" and value.isdigit():
                return int(value)
        return 4

    def as_json(self) -> dict[str, Any]:
        """Plain values, as they come back from a JSON file."""
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        rates: list[str | None] = [*self.rates]
        return values | {"rates": rates or [None]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """The settings whose ``as_json`` these values are; what else stands among them is left out."""
        known = {field.name: values[field.name] for field in fields(cls)}
        known["rates"] = [rate for rate in known["rates"] if rate is not None]
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in known.items()
        }
        return cls(**arguments)


def plan_cells(settings: Settings) -> list[dict[str, Any]]:
    """Return the comparison's cells, without repeats: one node once, each strategy on more nodes once for each rate."""
    cells: list[dict[str, Any]] = []
    rates: Sequence[str | None] = settings.rates or (None,)
    for nodes in sorted(set(settings.nodes)):
        names = ("none",) if nodes == 1 else tuple(name for name in settings.sync if name != "none")
        for rate in rates if nodes > 1 else (None,):
            cells += [_cell(settings, name, nodes, rate) for name in names]
    if not cells:
        raise UserError(
            "--sync none is one node's; there is nothing to compare on "
            f"{' and '.join(map(str, settings.nodes))} nodes: add a strategy, or 1 to --nodes"
        )
    return cells


def in_turns(
    settings: Settings, cells: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], int]]:
    """Return all runs, a cell and the number of its repeat from 0: all cells once, then all again in the opposite order, so that
    a drift affects all cells alike."""
    return [
        (cell, repeat)
        for repeat in range(len(settings.seeds_to_run))
        for cell in (cells if repeat % 2 == 0 else reversed(cells))
    ]


def run_name(cell: Mapping[str, Any], repeat: int) -> str:
    """Return the run as a person reads it, e.g. "ring on 2 nodes at 1gbit, repeat 1"."""
    at = "" if cell["rate"] is None else f" at {cell['rate']}"
    return f"{cell['sync']} on {cell['nodes']} node{'s' if cell['nodes'] > 1 else ''}{at}, repeat {repeat + 1}"


def _cell(settings: Settings, sync: str, nodes: int, rate: str | None) -> dict[str, Any]:
    return {
        "id": f"{sync}-{cell_suffix(nodes, rate)}",
        "sync": sync,
        "nodes": nodes,
        "rate": rate,
        "batch_size": settings.batch_size * (nodes if settings.scaling == "weak" else 1),
        "exact": is_exact(sync),
        "group": 0,
        "oversubscribed": False,
        "status": "pending",
        "message": None,
        "repeats": [],
        "median": None,
        "interval": None,
    }


def cell_suffix(nodes: int, rate: str | None) -> str:
    """Return the part of a file's name that says how many nodes and which rate, e.g. "n2-1gbit"."""
    return f"n{nodes}" + ("" if rate is None else "-" + re.sub(r"[^a-z0-9.]", "", rate.lower()))


def part_of(sync: str) -> str:
    """Return the part that offers a strategy."""
    return "PartOne" if sync == "none" else "PartThree" if sync in BUILT_IN else "PartTwo"


def run_folder(folder: Path, cell: Mapping[str, Any], repeat: int) -> Path:
    """Return where the repeat of a cell writes, below the comparison's folder."""
    strategy = f"{part_of(cell['sync'])}-{cell['sync']}"
    run = f"{cell_suffix(cell['nodes'], cell['rate'])}-{repeat + 1}"
    return folder / "runs" / strategy / run


def node_command(
    settings: Settings, cell: Mapping[str, Any], repeat: int, folder: Path
) -> Sequence[str]:
    """Return the command of each node, without ``--master-ip``, ``--num-nodes`` and ``--rank``."""
    sync, path = cell["sync"], run_folder(folder, cell, repeat)
    command = [
        *part_command(part_of(sync)),
        *(("--sync", sync) if sync not in ("none", "ddp") else ()),
        "--dataset",
        settings.dataset,
        "--model",
        settings.model,
        "--batch-size",
        str(cell["batch_size"]),
        "--seed",
        str(settings.seeds_to_run[repeat]),
        "--untimed-steps",
        str(settings.warmup),
        "--timeline",
        "--output-dir",
        str(path.parent.parent),
        "--run-name",
        path.name,
    ]
    if settings.until_accuracy is None:
        command += ["--max-steps", str(settings.total_steps), "--measure-only"]
    else:
        command += [
            "--epochs",
            str(settings.epochs),
            "--target-accuracy",
            str(settings.until_accuracy),
            "--patience",
            "1",
            "--keep-checkpoints",
            "1",
        ]
    if settings.emulated:
        command += ["--compute", str(profile_file(folder))]
    return [*command, *settings.flags]


def profile_file(folder: Path) -> Path:
    """Return where a comparison keeps the profile of its emulated compute."""
    return folder / "profile.json"
