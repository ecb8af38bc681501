"""The data that tables, figures and findings read.

``blocks(results)`` splits the cells by group (data, batch, seed, model) and by link rate into
blocks, each a ``ComparisonGroup`` of ``CellRow``. Only cells of one block are drawn or ordered
together. ``CellRow`` alone computes speed-ups, efficiencies and prediction errors.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from common.errors import UserError
from common.sync import STRATEGIES
from lab.predict.readable import bandwidth_text, duration_text
from lab.units import parse_rate

__all__ = [
    "NOTHING",
    "CellRow",
    "ComparisonGroup",
    "Interval",
    "bandwidth_text",
    "blocks",
    "duration_text",
    "interval_text",
    "nodes_text",
    "order",
    "percent",
    "rate_text",
    "safe_name",
    "seconds_text",
    "what_is_emulated",
]

NOTHING = "–"
Interval = tuple[float, float]
_CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
_RATE_UNITS = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))


@dataclass(frozen=True)
class CellRow:
    """A cell and what follows from it, in seconds, bytes and ratios; None if unknown."""

    cell: Mapping[str, Any]
    baseline: "CellRow | None"  # the one-node cell
    scaling: str
    prediction: Mapping[str, Any]  # empty if nothing was predicted

    @property
    def id(self) -> str:
        return self.cell["id"]

    @property
    def name(self) -> str:
        """The cell as a person writes it: ``overlapped, 2 nodes``."""
        return f"{self.sync}, {nodes_text(self.nodes)}"

    @property
    def sync(self) -> str:
        return self.cell["sync"]

    @property
    def nodes(self) -> int:
        return self.cell["nodes"]

    @property
    def exact(self) -> bool:
        return bool(self.cell.get("exact", True))

    @property
    def status(self) -> str:
        return self.cell.get("status", "pending")

    @property
    def repeats(self) -> list[Mapping[str, Any]]:
        """The successful repeats."""
        return [
            repeat for repeat in self.cell.get("repeats") or [] if repeat.get("status") == "done"
        ]

    def median(self, name: str) -> float | None:
        """Return the median over the repeats of ``name`` (step, wait, root_bytes_sent ...)."""
        return (self.cell.get("median") or {}).get(name)

    def interval(self, name: str) -> Interval | None:
        """Return the 95 % interval over the repeats of ``name``, or None for a single repeat."""
        low, high = (self.cell.get("interval") or {}).get(name) or (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def step(self) -> float | None:
        return self.median("step")

    @property
    def measured_step(self) -> float:
        """``step`` of a row of ``ComparisonGroup.measured``: those always have one."""
        return self.step or 0.0

    @cached_property
    def speedup(self) -> float | None:
        """One node's step time over this cell's (weak scaling: ratio of samples per second)."""
        one = self.baseline.step if self.baseline else None
        return one / self.step * self._sample_ratio if one and self.step else None

    @cached_property
    def speedup_interval(self) -> Interval | None:
        """The range of the speed-up over both step intervals; infinite if this cell's reaches 0."""
        one, own = (row.interval("step") if row else None for row in (self.baseline, self))
        if one is None or own is None or own[1] <= 0:
            return None
        high = one[1] / own[0] if own[0] > 0 else math.inf
        return one[0] / own[1] * self._sample_ratio, high * self._sample_ratio

    @property
    def _sample_ratio(self) -> float:
        """Samples per step over one node's: 1 in strong scaling."""
        own, one = (row.cell.get("batch_size") for row in (self, self.baseline or self))
        return own / one if self.scaling == "weak" and own and one else 1.0

    @property
    def efficiency(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.nodes

    @property
    def samples_per_second(self) -> float | None:
        batch = self.cell.get("batch_size")
        return batch / self.step if batch and self.step else None

    @property
    def predicted(self) -> float | None:
        return self.prediction.get("step_seconds")

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step time: predicted / measured - 1."""
        return self.predicted / self.step - 1 if self.predicted and self.step else None

    @property
    def in_scope(self) -> bool:
        return bool(self.prediction.get("in_scope"))

    @property
    def total_bytes(self) -> float | None:
        """Bytes that all ranks together send per step."""
        root, others = self.median("root_bytes_sent"), self.median("others_bytes_sent")
        return None if root is None else root + (self.nodes - 1) * (others or 0.0)

    def memory(self, *, predicted: bool = False) -> Mapping[str, int]:
        """Return by kind the bytes of tensors on the rank with most of them; empty if unknown."""
        name = "predicted_memory" if predicted else "memory"
        ranks = [rank for repeat in self.repeats for rank in repeat.get("ranks") or []]
        found = [rank[name] for rank in ranks if rank.get(name)]
        return max(found, key=lambda memory: sum(memory.values()), default={})

    def per_rank(self, name: str) -> list[float]:
        """Return ``name`` of each rank that has it, averaged over the successful repeats."""
        lists = [[rank.get(name) for rank in repeat.get("ranks") or []] for repeat in self.repeats]
        return [fmean(values) for values in zip(*lists, strict=False) if None not in values]


@dataclass(frozen=True)
class ComparisonGroup:
    """Cells that differ only in strategy and number of nodes; ``suffix`` ends figure names."""

    group: int
    rate: Any
    label: str
    suffix: str
    rows: Sequence[CellRow]
    scaling: str
    emulated: bool
    settings: Mapping[str, Any]
    predicted_at: str = ""  # when the prediction was made, in ISO format

    @property
    def first_start(self) -> str:
        """When the first run started, in ISO format; empty unless every run recorded its start."""
        starts = [repeat.get("started") or "" for row in self.rows for repeat in row.repeats]
        return min(starts, default="")

    @property
    def measured(self) -> list[CellRow]:
        return [row for row in self.rows if row.step]

    @property
    def baseline(self) -> CellRow | None:
        return next((row for row in self.measured if row.nodes == 1), None)

    @property
    def nodes_beyond_one(self) -> list[int]:
        """Numbers of nodes above one that have cells."""
        return sorted({row.nodes for row in self.rows if row.nodes > 1})

    @property
    def nodes(self) -> list[int]:
        """Numbers of nodes above one that have cells, or [1] if there are none."""
        return self.nodes_beyond_one or sorted({row.nodes for row in self.rows})

    @property
    def syncs(self) -> list[str]:
        """The strategies on more than one node, in the order of ``order``."""
        return sorted({row.sync for row in self.rows if row.nodes in self.nodes}, key=order)

    def at(self, nodes: int) -> list[CellRow]:
        """Return the measured cells on ``nodes`` nodes."""
        return [row for row in self.measured if row.nodes == nodes]

    def find(self, sync: str, nodes: int) -> CellRow | None:
        return next((row for row in self.rows if (row.sync, row.nodes) == (sync, nodes)), None)

    @property
    def classes(self) -> int | None:
        """Number of classes of the data, if known."""
        return self.settings.get("num_classes") or _CLASSES.get(self.settings.get("dataset", ""))


def order(sync: str) -> tuple[int, str]:
    """Return the sort key of a strategy: known ones first, in their own order."""
    strategy = sync.partition("-")[0]  # "ddp-auto" follows "ddp"
    return ([*STRATEGIES, strategy].index(strategy), sync)


def blocks(results: Mapping[str, Any]) -> list[ComparisonGroup]:
    """Split the cells into comparable blocks; each block of a group has its one-node cell."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for cell in results.get("cells") or []:
        groups.setdefault(cell.get("group", 0), []).append(cell)
    keys = [(group, rate) for group, cells in sorted(groups.items()) for rate in _rates(cells)]
    many_rates = len({rate for _, rate in keys}) > 1
    found = []
    for group, rate in keys:
        names = [(f"group {group}", f"-group{group}")] if len(groups) > 1 else []
        if many_rates:
            name = safe_name(rate if isinstance(rate, str) else rate_text(rate))
            names.append((rate_text(rate), f"-{name}"))
        settings = _group_settings(results, group)
        scaling = (results.get("settings") or {}).get("scaling") or "strong"
        found.append(
            ComparisonGroup(
                group=group,
                rate=rate,
                label=", ".join(label for label, _ in names),
                suffix="".join(suffix for _, suffix in names),
                rows=_rows(results, groups[group], rate, scaling),
                scaling=scaling,
                emulated=bool(results.get("emulated"))
                and (settings.get("compute") != "real" or rate is not None),
                settings=settings,
                predicted_at=(results.get("prediction") or {}).get("made") or "",
            )
        )
    return found


def _rates(cells: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the link rates of a group's cells on several nodes, or of its one-node cell."""
    several = [cell for cell in cells if cell["nodes"] > 1]
    return list(dict.fromkeys(cell.get("rate") for cell in several or cells[:1]))


def _rows(
    results: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], rate: Any, scaling: str
) -> list[CellRow]:
    """Return the rows of a block: a group's cells of this rate, and its one-node cell."""
    predictions = (results.get("prediction") or {}).get("cells") or {}
    # one node of this rate, or else of any
    ones = sorted(
        (cell for cell in cells if cell["nodes"] == 1), key=lambda cell: cell.get("rate") != rate
    )
    mine = ones[:1] + [cell for cell in cells if cell["nodes"] > 1 and cell.get("rate") == rate]
    baseline = CellRow(ones[0], None, scaling, {}) if ones else None
    rows = [CellRow(cell, baseline, scaling, predictions.get(cell["id"]) or {}) for cell in mine]
    return sorted(rows, key=lambda row: (row.nodes, order(row.sync)))


def _group_settings(results: Mapping[str, Any], group: int) -> dict[str, Any]:
    """Return the settings that all groups share, and the group's own."""
    differing = {str(difference).split(":")[0] for difference in results.get("differences") or []}
    common = results.get("settings") or {}
    return {
        "gpus": (results.get("environment") or {}).get("gpus"),
        **{name: value for name, value in common.items() if name not in differing},
        **((results.get("groups") or {}).get(str(group)) or {}),
    }


def what_is_emulated(settings: Mapping[str, Any]) -> str:
    """Return a sentence that says what an emulated comparison imitated."""
    profile = str(settings.get("compute")).rpartition("/")[2].removesuffix(".json")
    rates = [rate_text(rate) for rate in settings.get("rates") or [] if rate is not None]
    parts = {
        f"layers and updates sleep for the times of profile '{profile}', so nothing is "
        "learned": settings.get("compute") not in (None, "real"),
        "the nodes are network namespaces of one machine, with links of "
        f"{' and '.join(rates)}": bool(rates),
    }
    what = "; ".join(part for part, holds in parts.items() if holds)
    return f"EMULATED: {what or 'network or compute were imitated on one machine'}."


def small_text(value: float, digits: int = 2) -> str:
    """Return a number that may be tiny with few digits: ``0.017`` or ``2.6e-5``."""
    return f"{value:.{digits}g}".replace("e-0", "e-")


def rate_text(rate: Any) -> str:
    """Return a link rate as text; ``rate`` is bits per second, a text for ``--rate``, or None."""
    if rate is None:
        return "unshaped"
    if isinstance(rate, str):
        try:
            rate = parse_rate(rate)
        except UserError:
            return rate
    larger = (f"{rate / size:g} {unit}" for unit, size in _RATE_UNITS if rate >= size)
    return next(larger, f"{rate:g} bit/s")


def seconds_text(value: float | None, scale: float | None) -> str:
    """Return seconds with 3 decimals, or 4 or 5 if ``scale``, the step's time, is below 0.1 s."""
    digits = 3 + sum((scale or 1.0) < limit for limit in (0.1, 0.01))
    return NOTHING if value is None else f"{value:.{digits}f}"


def interval_text(row: CellRow) -> str:
    """Return the 95 % interval of a step as `` [0.351, 0.366]``, or an empty text without one."""
    ends = row.interval("step")
    return f" [{', '.join(seconds_text(end, row.step) for end in ends)}]" if ends else ""


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """Return a share as text: ``25 %``."""
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def nodes_text(nodes: int) -> str:
    """Return ``1 node`` or ``4 nodes``."""
    return f"{nodes} node{'s' if nodes != 1 else ''}"


def safe_name(text: str) -> str:
    """Return ``text`` as a part of a file name."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:80] or "cell"
