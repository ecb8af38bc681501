"""The data that tables, figures and findings read.

``blocks(results)`` splits the cells by group (data, batch, seed, model) and by link rate into
blocks, each a ``ComparisonGroup`` of ``CellRow``. Only cells of one block are drawn or ordered
together. ``CellRow`` alone computes speed-ups, efficiencies and prediction errors.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean, median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import UserError, count
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from common.utils.typed_json import Name, Ranks, Text
from lab.units import parse_rate

NOTHING = "–"
# An object of results.json, which lab/compare/results.py has checked.
Json = Mapping[str, Any]
LinkRate = Annotated[str, Meta(pattern=r"^[\w. /]{1,40}\Z")] | Annotated[float, Meta(gt=0, le=1e18)]
BatchSize = Annotated[int, Meta(ge=1, le=2**40)] | Annotated[float, Meta(gt=0, le=2**40)]
Interval = tuple[float, float]
_RATE_UNITS = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))


class CellRow(msgspec.Struct, frozen=True, eq=False):
    """A cell of results.json and what follows from it, in seconds, bytes and ratios.

    What is unknown is None, except ``step``, which is then 0.
    """

    id: Name
    sync: Name
    nodes: Ranks
    rate: LinkRate | None
    batch_size: BatchSize | None
    exact: bool
    oversubscribed: bool
    status: Annotated[str, Meta(pattern=r"^(done|partial|failed|pending)\Z")]
    message: Text | None
    repeats: Sequence[Json]
    medians: Json | None = msgspec.field(name="median")
    intervals: Json | None = msgspec.field(name="interval")
    baseline: "CellRow | None" = None  # the one-node cell
    prediction: Json = {}  # empty if nothing was predicted

    @property
    def name(self) -> str:
        """The cell as a person writes it: ``overlapped on 2 nodes``."""
        return f"{self.sync} on {count(self.nodes, 'node')}"

    @property
    def runs(self) -> list[Json]:
        """The successful repeats."""
        return [repeat for repeat in self.repeats if repeat["status"] == "done"]

    def median(self, name: str) -> float | None:
        """Return the median over the repeats of ``name`` (step, wait, root_bytes_sent ...)."""
        return (self.medians or {}).get(name)

    def interval(self, name: str) -> Interval | None:
        """Return the 95 % interval over the repeats of ``name``, or None for a single repeat."""
        low, high = (self.intervals or {}).get(name) or (None, None)
        return None if low is None or high is None else (low, high)

    def seconds(self, name: str) -> float:
        """Return the median of a time; every run records them all, so unknown means no run."""
        return self.median(name) or 0.0

    @property
    def step(self) -> float:
        return self.seconds("step")

    def _over_one_node(self, one_step: float, step: float) -> float:
        """Return the samples per second with these step times, over one node's.

        In strong scaling the batches are the same, so it is the ratio of the step times.
        """
        samples, one = self.batch_size, self.baseline.batch_size if self.baseline else None
        ratio = samples / one if samples and one else 1.0
        return one_step / step * ratio if step > 0 else math.inf

    @property
    def speedup(self) -> float | None:
        one = self.baseline.step if self.baseline else 0.0
        return self._over_one_node(one, self.step) if one and self.step else None

    @property
    def speedup_interval(self) -> Interval | None:
        """The range of the speed-up over both step intervals; infinite if this cell's reaches 0."""
        one = self.baseline.interval("step") if self.baseline else None
        own = self.interval("step")
        if one is None or own is None or own[1] <= 0:
            return None
        return self._over_one_node(one[0], own[1]), self._over_one_node(one[1], own[0])

    @property
    def mean_iteration(self) -> float | None:
        """The mean time of an iteration without the first; the median over the repeats."""
        found = [mean for run in self.runs if (mean := run.get("mean_iteration_seconds"))]
        return median(found) if found else None

    @property
    def efficiency(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.nodes

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step time: predicted / measured - 1."""
        predicted = self.prediction.get("step_seconds")
        return predicted / self.step - 1 if predicted and self.step else None

    @property
    def root_share(self) -> float | None:
        """Rank 0's share of the bytes that all ranks send."""
        root, others = self.median("root_bytes_sent"), self.median("others_bytes_sent")
        return root / (root + (self.nodes - 1) * (others or 0.0)) if root else None

    def memory(self, name: str = "memory") -> Mapping[str, int]:
        """Return by kind the bytes of tensors on the rank with most of them; empty if unknown.

        name : "memory", or "predicted_memory" for the closed form.
        """
        found = [rank[name] for run in self.runs for rank in run["ranks"] if rank.get(name)]
        return max(found, key=lambda memory: sum(memory.values()), default={})

    def per_rank(self, name: str) -> list[float]:
        """Return ``name`` of each rank that has it, averaged over the successful repeats."""
        lists = [[rank.get(name) for rank in run["ranks"]] for run in self.runs]
        return [fmean(values) for values in zip(*lists, strict=False) if None not in values]


Rows = Sequence[CellRow]


@dataclass(frozen=True)
class ComparisonGroup:
    """Cells that differ only in strategy and number of nodes; ``suffix`` ends figure names."""

    group: int
    rate: Any
    label: str
    suffix: str
    rows: Rows
    emulated: bool
    settings: Json
    timelines: Json

    @property
    def weak(self) -> bool:
        return self.settings.get("scaling") == "weak"

    @property
    def emulated_compute(self) -> bool:
        return self.settings.get("compute") not in (None, "real")

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


def order(sync: str) -> tuple[int, str]:
    """Return the sort key of a strategy: known ones first, in their own order."""
    strategy = sync.partition("-")[0]  # "ddp-auto" follows "ddp"
    return ([*STRATEGIES, strategy].index(strategy), sync)


def blocks(results: Json) -> list[ComparisonGroup]:
    """Split the cells into comparable blocks; each block of a group has its one-node cell."""
    groups = grouped((cell["group"], cell) for cell in results["cells"])
    keys = [
        (group, rate)
        for group, cells in sorted(groups.items())
        for rate in dict.fromkeys(cell["rate"] for cell in cells if cell["nodes"] > 1)
        or [cells[0]["rate"]]
    ]
    several = (len(groups) > 1, len({rate for _, rate in keys}) > 1)  # what tells blocks apart
    prediction, shared = results.get("prediction") or {}, results["settings"]
    differing = [difference.split(":")[0] for difference in results.get("differences", [])]
    found = []
    for group, rate in keys:
        ending = re.sub(r"[^\w.]+", "_", rate if isinstance(rate, str) else rate_text(rate))
        own = results.get("groups", {}).get(str(group), {})
        apart = [f"{name.replace('_', ' ')} {own[name]}" for name in differing if name in own]
        name = listed(apart, limit=2) if apart else f"group {group}"
        settings = {  # those that all groups share, and the group's own
            **{name: value for name, value in shared.items() if name not in differing},
            **own,
        }
        imitated = rate is not None or settings.get("compute") != "real"
        found.append(
            ComparisonGroup(
                group=group,
                rate=rate,
                label=", ".join(compress((name, rate_text(rate)), several)),
                suffix="".join(compress((f"-group{group}", f"-{ending}"), several)),
                rows=_rows(groups[group], rate, prediction.get("cells", {})),
                emulated=bool(results.get("emulated")) and imitated,
                settings=settings,
                timelines=results["timelines"],
            )
        )
    return found


def _rows(cells: Sequence[Json], rate: Any, predictions: Json) -> list[CellRow]:
    """Return the rows of a block: a group's cells of this rate, and its one-node cell."""
    # one node of this rate, or else of any
    one = sorted(
        (cell for cell in cells if cell["nodes"] == 1), key=lambda cell: cell["rate"] != rate
    )[:1]
    several = [cell for cell in cells if cell["nodes"] > 1 and cell["rate"] == rate]
    more = {"baseline": msgspec.convert(one[0], CellRow) if one else None}
    rows = [
        msgspec.convert({**cell, **more, "prediction": predictions.get(cell["id"], {})}, CellRow)
        for cell in [*one, *several]
    ]
    return sorted(rows, key=lambda row: (row.nodes, order(row.sync)))


def what_is_emulated(settings: Json) -> str:
    """Return a sentence that says what an emulated comparison imitated."""
    profile = str(settings.get("compute")).rpartition("/")[2].removesuffix(".json")
    rates = [rate_text(rate) for rate in settings.get("rates") or [] if rate is not None]
    parts = {
        f"layers and updates sleep for the times of profile '{profile}', so nothing is "
        "learned: there are no losses and no accuracies, and memory is without activations; step "
        "times, overlap, waiting and bytes are valid": settings.get("compute")
        not in (None, "real"),
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


def listed(names: Sequence[str], *, limit: int = 20) -> str:
    """Return ``a, b and c``; of more than ``limit`` names, the number of the others."""
    names = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
