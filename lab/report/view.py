"""What tables, figures and findings read: cells that may stand side by side as a ``ComparisonGroup``, each cell as a ``CellRow``.

``blocks(results)`` splits the cells by group (data, batch, seed, model) and by rate of the link; only cells of one block are
ever drawn or ordered together. Speed-ups, efficiencies and prediction errors are computed here and nowhere else.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from common.errors import UserError
from common.sync import STRATEGIES
from lab.units import parse_rate

NOTHING = "–"
Interval = tuple[float, float]
_CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}


@dataclass(frozen=True)
class CellRow:
    """A cell with what follows from it. Seconds, bytes and ratios; None where the run has not said."""

    cell: Mapping[str, Any]
    baseline: Mapping[str, Any] | None
    scaling: str
    prediction: Mapping[str, Any]  # empty where nothing was predicted

    @property
    def id(self) -> str:
        return self.cell["id"]

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
        """The repeats that ended well."""
        return [
            repeat for repeat in self.cell.get("repeats") or [] if repeat.get("status") == "done"
        ]

    def median(self, name: str) -> float | None:
        """The median over the repeats of ``name`` (step, data, ..., wait, wire, root_bytes_sent, ...)."""
        return (self.cell.get("median") or {}).get(name)

    def interval(self, name: str) -> Interval | None:
        """The 95 % interval over the repeats, or None with a single repeat."""
        return _interval(self.cell, name)

    @property
    def step(self) -> float | None:
        return self.median("step")

    @property
    def measured(self) -> bool:
        return bool(self.step)

    @property
    def measured_step(self) -> float:
        """``step`` of a cell that is ``measured``."""
        assert self.step is not None  # callers take their rows from ``ComparisonGroup.measured``
        return self.step

    @cached_property
    def speedup(self) -> float | None:
        """How many times as fast as one node: its step time over this one's (weak: samples a second over its)."""
        one = (self.baseline.get("median") or {}).get("step") if self.baseline else None
        return one / self.step * self._more_samples if one and self.step else None

    @cached_property
    def speedup_interval(self) -> Interval | None:
        """The speed-up from the far ends of both step intervals: wider than either alone; infinite where one reaches 0."""
        one, own = _interval(self.baseline or {}, "step"), self.interval("step")
        if one is None or own is None:
            return None
        high = one[1] / own[0] if own[0] > 0 else math.inf
        return one[0] / own[1] * self._more_samples, high * self._more_samples

    @property
    def _more_samples(self) -> float:
        """Samples a step against one node's: 1 in strong scaling."""
        assert self.baseline is not None
        own, one = self.cell.get("batch_size"), self.baseline.get("batch_size")
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
        """Predicted over measured step time, less one."""
        return self.predicted / self.step - 1 if self.predicted and self.step else None

    @property
    def in_scope(self) -> bool:
        return bool(self.prediction.get("in_scope"))

    @property
    def compute(self) -> float | None:
        """Seconds of a step that are no exposed communication: data, forward, backward and update."""
        names = ("data", "forward", "backward", "update")
        parts = [value for name in names if (value := self.median(name)) is not None]
        return sum(parts) if len(parts) == len(names) else None

    @property
    def total_bytes(self) -> float | None:
        """Bytes that all ranks together send a step."""
        root, others = self.median("root_bytes_sent"), self.median("others_bytes_sent")
        return None if root is None else root + (self.nodes - 1) * (others or 0.0)

    def per_rank(self, name: str) -> list[float]:
        """``name`` of each rank, averaged over the repeats that ended well; empty where it is not known."""
        lists = [[rank.get(name) for rank in repeat.get("ranks") or []] for repeat in self.repeats]
        return [fmean(values) for values in zip(*lists, strict=False) if None not in values]


def _interval(cell: Mapping[str, Any], name: str) -> Interval | None:
    low, high = (cell.get("interval") or {}).get(name) or (None, None)
    return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class ComparisonGroup:
    """Cells that differ in strategy and number of nodes alone. ``suffix`` ends the names of its figures."""

    group: int
    rate: Any
    label: str
    suffix: str
    rows: tuple[CellRow, ...]
    scaling: str
    emulated: bool
    settings: Mapping[str, Any]

    @property
    def measured(self) -> list[CellRow]:
        return [row for row in self.rows if row.measured]

    @property
    def baseline(self) -> CellRow | None:
        return next((row for row in self.rows if row.nodes == 1 and row.measured), None)

    @property
    def nodes_beyond_one(self) -> list[int]:
        """Numbers of nodes beyond one that have cells."""
        return sorted({row.nodes for row in self.rows if row.nodes > 1})

    @property
    def nodes(self) -> list[int]:
        """Numbers of nodes beyond one that have cells; [1] where there is no other."""
        return self.nodes_beyond_one or sorted({row.nodes for row in self.rows})

    @property
    def syncs(self) -> list[str]:
        """The strategies on more than one node, in the order in which they are shown everywhere."""
        return sorted(
            {row.sync for row in self.rows if row.nodes > 1 or self.nodes == [1]}, key=order
        )

    def at(self, nodes: int) -> list[CellRow]:
        """The measured cells on ``nodes`` nodes."""
        return [row for row in self.measured if row.nodes == nodes]

    def find(self, sync: str, nodes: int) -> CellRow | None:
        return next((row for row in self.rows if (row.sync, row.nodes) == (sync, nodes)), None)

    @property
    def classes(self) -> int | None:
        """Number of classes of the data, where it is known."""
        return self.settings.get("num_classes") or _CLASSES.get(self.settings.get("dataset", ""))


def order(sync: str) -> tuple[int, str]:
    """The key that sorts strategies as everywhere: known ones first, in their order."""
    known = list(STRATEGIES)
    return (known.index(sync) if sync in known else len(known), sync)


def blocks(results: Mapping[str, Any]) -> list[ComparisonGroup]:
    """Split the cells into blocks that may be compared; a one-node cell stands in every rate of its group."""
    cells = results.get("cells") or []
    keys: dict[tuple[int, Any], None] = {}
    for group in sorted({cell.get("group", 0) for cell in cells}):
        mine = [cell for cell in cells if cell.get("group", 0) == group]
        rates = dict.fromkeys(cell.get("rate") for cell in mine if cell["nodes"] > 1)
        keys.update({(group, rate): None for rate in rates or {mine[0].get("rate"): None}})
    groups, many_rates = len({group for group, _ in keys}), len({rate for _, rate in keys}) > 1
    return [_block(results, group, rate, groups > 1, many_rates) for group, rate in keys]


def _block(
    results: Mapping[str, Any], group: int, rate: Any, many_groups: bool, many_rates: bool
) -> ComparisonGroup:
    mine = [
        cell
        for cell in results["cells"]
        if cell.get("group", 0) == group and (cell["nodes"] == 1 or cell.get("rate") == rate)
    ]
    ones = [cell for cell in mine if cell["nodes"] == 1]
    one = next((cell for cell in ones if cell.get("rate") == rate), ones[0] if ones else None)
    mine = [cell for cell in mine if cell["nodes"] > 1 or cell is one]
    scaling = (results.get("settings") or {}).get("scaling") or "strong"
    predictions = (results.get("prediction") or {}).get("cells") or {}
    rows = [CellRow(cell, one, scaling, predictions.get(cell["id"]) or {}) for cell in mine]
    labels = [f"group {group}"] if many_groups else []
    suffix = f"-group{group}" if many_groups else ""
    if many_rates:
        labels.append(rate_text(rate))
        suffix += "-" + safe_name(rate if isinstance(rate, str) else rate_text(rate))
    settings = group_settings(results, group)
    return ComparisonGroup(
        group=group,
        rate=rate,
        label=", ".join(labels),
        suffix=suffix,
        rows=tuple(sorted(rows, key=lambda row: (row.nodes, order(row.sync)))),
        scaling=scaling,
        emulated=bool(results.get("emulated"))
        and (settings.get("compute") != "real" or rate is not None),
        settings=settings,
    )


def group_settings(results: Mapping[str, Any], group: int) -> dict[str, Any]:
    """The settings of one group: its own, where ``results["groups"]`` has them by number, and what all groups have in common."""
    groups = results.get("groups") or {}
    differing = {str(difference).split(":")[0] for difference in results.get("differences") or []}
    common = {
        name: value
        for name, value in (results.get("settings") or {}).items()
        if name not in differing
    }
    return {**common, **(groups.get(str(group)) or {})}


def what_is_emulated(settings: Mapping[str, Any]) -> str:
    """What of an emulated comparison was imitated, as a sentence."""
    compute = settings.get("compute")
    rates = [rate for rate in settings.get("rates") or [] if rate is not None]
    parts = []
    if compute not in (None, "real"):
        name = str(compute).rpartition("/")[2].removesuffix(".json")
        parts.append(
            f"layers and update slept as long as they take by profile {name}, and nothing was learned"
        )
    if rates:
        parts.append(
            "the nodes were namespaces of one machine, their links limited to "
            + " and ".join(map(rate_text, rates))
        )
    what = "; ".join(parts) or "network or compute were imitated on one machine"
    return f"EMULATED: {what}."


def rate_text(rate: Any) -> str:
    """A link's rate as text; numbers are bits a second, texts as ``--rate`` takes them."""
    if rate is None:
        return "unshaped"
    if isinstance(rate, str):
        try:
            rate = parse_rate(rate)
        except UserError:
            return rate
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:g} {unit}"
    return f"{rate:g} bit/s"


def seconds_text(value: float | None, scale: float | None) -> str:
    """Seconds with 3 decimals, or with more where ``scale``, the step's own time, lies below 0.1 s."""
    digits = 3 if not scale or scale >= 0.1 else 4 if scale >= 0.01 else 5
    return NOTHING if value is None else f"{value:.{digits}f}"


def interval_text(row: CellRow) -> str:
    """The 95 % interval of a cell's step, in seconds, to follow its median: `` [0.351, 0.366]``; empty without one."""
    ends = row.interval("step")
    return f" [{', '.join(seconds_text(end, row.step) for end in ends)}]" if ends else ""


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """A share as text: ``25 %``."""
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def safe_name(text: str) -> str:
    """``text`` as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:80] or "cell"
