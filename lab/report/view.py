"""The data that tables, figures and findings read.

``blocks(comparison)`` splits the cells by group (data, batch, seed, model) and by link rate into
blocks, each a ``ComparisonGroup`` of ``CellRow``. Only cells of one block are drawn or ordered
together. ``CellRow`` alone computes speed-ups, efficiencies and prediction errors.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, filterfalse
from operator import attrgetter
from statistics import fmean, median
from typing import Literal

from common.errors import UserError
from common.runs import TimelineFile, shared_nodes
from common.say import count, listed, rate_text
from common.sync import STRATEGIES, plan_class
from common.sync.memory_cost import Memory
from common.sync.plans.base import ReplicatedPlan
from common.utils.grouping import grouped
from lab.comparison.cell import interval, steps_of
from lab.comparison.record import (
    Cell,
    Comparison,
    GroupSettings,
    LinkRate,
    Medians,
    PredictedCell,
    Repeat,
)
from lab.predict.variants import split_variant
from lab.report.claims import CellClaim, claim_of
from lab.report.timeline import message_share
from lab.units import parse_rate

NOTHING = "–"
NOISY = 0.5  # of the time: a wider interval gets a warning
Place = Literal["node", "rank"]
Interval = tuple[float, float]
_NOT_MEASURED = Medians(
    step=0.0, data=0.0, forward=0.0, backward=0.0, sync=0.0, update=0.0, wait=0.0, wire=0.0
)


@dataclass(frozen=True, eq=False)
class CellRow:
    """A cell and what follows from it, in seconds, bytes and ratios.

    ``seconds`` is what the report compares: the assignment's mean iteration without the first, or
    the step where a cell beside it has no such mean. It is a mean over the repeats, like ``step``,
    and its interval is of that mean. The sections are medians over the repeats.

    baseline : the cell of a single rank. place : "node" if each rank has a machine of its own,
    a real or an emulated one, or shares one with as many as each other rank; else "rank", as for
    a single rank where nodes have several. What is unknown is None, except ``step`` and the other
    ``medians``, which are 0 s if nothing was measured.
    """

    cell: Cell
    baseline: "CellRow | None" = None
    prediction: PredictedCell | None = None
    place: Place = "rank"
    emulated_compute: bool = False
    by_iterations: bool = False
    timeline: TimelineFile | None = None

    @property
    def sync(self) -> str:
        return self.cell.sync

    @property
    def nodes(self) -> int:
        return self.cell.nodes

    @property
    def ranks(self) -> int:
        return self.cell.ranks

    @property
    def exact(self) -> bool:
        return self.cell.exact

    @property
    def runs(self) -> list[Repeat]:
        """The successful repeats."""
        return self.cell.runs

    @property
    def name(self) -> str:
        """The cell as a person writes it: ``overlapped on 2 ranks``."""
        return f"{self.sync} on {count(self.nodes, self.place)}"

    @property
    def alone(self) -> Place:
        """What the single rank is called with which the cell is compared."""
        return self.place if self.baseline is None else self.baseline.place

    @cached_property
    def claim(self) -> CellClaim:
        """What is known of its claim to be exact."""
        return claim_of(self.cell, emulated=self.emulated_compute)

    @property
    def medians(self) -> Medians:
        return self.cell.medians or _NOT_MEASURED

    @cached_property
    def step(self) -> float:
        """The step, whose sections are ``medians``; 0 if nothing was measured."""
        if self.cell.medians is None:
            return 0.0
        return fmean(steps_of(self.cell) or [self.cell.medians.step])

    def recorded(self, name: str) -> list[float]:
        """Return ``name`` of each successful repeat that recorded it."""
        values = [getattr(run, name) for run in self.runs]
        return [value for value in values if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of ``name`` over the repeats that recorded it, if any did."""
        recorded = self.recorded(name)
        return fmean(recorded) if recorded else None

    @cached_property
    def seconds(self) -> float:
        """The time that is compared: of an iteration, or of a step."""
        if self.by_iterations:
            return self.mean("mean_iteration_seconds") or 0.0
        return self.step

    def interval(self, name: str) -> Interval | None:
        """Return the 95 % interval over the repeats of ``name``, or None for a single repeat.

        name : "seconds", "step", "iteration", or a section's.
        """
        if name == "seconds":
            name = "iteration" if self.by_iterations else "step"
        low, high = (self.cell.intervals or {}).get(name, (None, None))
        if name == "step":
            low, high = interval(steps_of(self.cell))
        elif name == "iteration":
            low, high = interval(self.recorded("mean_iteration_seconds"))
        if low is None or high is None:
            return None
        return low, high

    @property
    def noisy(self) -> bool:
        """Whether the 95 % interval is wider than half of the time."""
        ends = self.interval("seconds")
        return ends is not None and ends[1] - ends[0] > NOISY * self.seconds

    @cached_property
    def own_work(self) -> float | None:
        """The seconds of sync in which the strategy computed: compressed, added, copied.

        The recorded step's share of the time after waiting, in which no message of a rank was under
        way. None: not separated, because no step was recorded.
        """
        if self.timeline is None:
            return None
        share = message_share(self.timeline.ranks)
        if share is None:
            return None
        return (1 - share) * self.medians.wire

    @property
    def speedup(self) -> float | None:
        one = self.baseline
        if one is None or not one.seconds or not self.seconds:
            return None
        return self._over_one_node(one, one.seconds, self.seconds)

    @property
    def speedup_interval(self) -> Interval | None:
        """The range of the speed-up over both intervals; infinite if this cell's reaches 0."""
        if self.baseline is None:
            return None
        one = self.baseline.interval("seconds")
        own = self.interval("seconds")
        if one is None or own is None or own[1] <= 0:
            return None
        slowest = self._over_one_node(self.baseline, one[0], own[1])
        fastest = self._over_one_node(self.baseline, one[1], own[0])
        return slowest, fastest

    def _over_one_node(self, one: "CellRow", one_step: float, step: float) -> float:
        """Return the samples per second with these step times, over one node's.

        In strong scaling the batches are the same, so it is the ratio of the step times.
        """
        if step <= 0:
            return math.inf
        ratio = one_step / step
        if self.cell.batch_size and one.cell.batch_size:
            ratio *= self.cell.batch_size / one.cell.batch_size
        return ratio

    @property
    def efficiency(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.ranks

    @property
    def last_loss(self) -> float | None:
        """The training loss of the last step; the median over the repeats."""
        last = [run.losses[-1][1] for run in self.runs if run.losses]
        known = [loss for loss in last if loss is not None]
        return median(known) if known else None

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step time: predicted / measured - 1."""
        if self.prediction is None or not self.step:
            return None
        return self.prediction.step_seconds / self.step - 1

    @property
    def root_share(self) -> float | None:
        """Rank 0's share of the bytes that all ranks send; of several ranks a node, node 0's share.

        The latter counts what passes the nodes' links.
        """
        if self.cell.ranks_per_node > 1:
            sent = [sent for sent, _ in self.link_bytes]
            return sent[0] / sum(sent) if any(sent) else None
        sent = self.bytes_sent
        if not any(sent):
            return None
        return sent[0] / sum(sent)

    @property
    def counted(self) -> bool:
        """Whether its runs counted the bytes that were sent; over links they always are."""
        return self.cell.ranks_per_node > 1 or self.medians.root_bytes_sent is not None

    @cached_property
    def bytes_sent(self) -> list[float]:
        """The bytes of each rank in a step; by the strategy's plan where none were counted.

        Empty if the plan is unknown.
        """
        root = self.medians.root_bytes_sent
        if root is not None:
            return [root] + [self.medians.others_bytes_sent or 0.0] * (self.ranks - 1)
        if self.prediction is not None and self.prediction.bytes_sent:
            return self.prediction.bytes_sent
        strategy, _ = split_variant(self.sync)
        gradients = self.predicted_memory.get("gradients", 0)
        if not self.exact or strategy not in STRATEGIES or not gradients:
            return []
        plan = plan_class(strategy)
        if not issubclass(plan, ReplicatedPlan):
            return []
        sent = plan().bytes_sent
        return [float(sent([gradients], rank, self.ranks)) for rank in range(self.ranks)]

    @property
    def link_bytes(self) -> list[tuple[float, float]]:
        """What each emulated node sent and received over its link in a step; empty if unknown."""
        if self.cell.rate is None or self.nodes == 1:
            return []
        counted = []
        for run in self.runs:
            leaders = run.ranks[:: self.cell.ranks_per_node]
            counted.append([(row.link_sent_bytes, row.link_received_bytes) for row in leaders])
        found = []
        for of_node in zip(*counted, strict=True):
            sent, received = zip(*of_node, strict=True)
            if None in sent or None in received:
                return []
            found.append((fmean(sent), fmean(received)))
        return found

    @property
    def busiest_link_bytes(self) -> float | None:
        """What the busiest link carried in its busier direction in a step, with headers."""
        return max(chain.from_iterable(self.link_bytes), default=None)

    @property
    def planned_busiest_link_bytes(self) -> float | None:
        """The same by the strategy's plan, without headers."""
        if self.prediction is None:
            return None
        return max(chain.from_iterable(self.prediction.link_bytes), default=None)

    @property
    def memory(self) -> Memory:
        """Bytes of tensors by kind on the rank with most of them; empty if unknown."""
        return _largest(rank.memory for run in self.runs for rank in run.ranks)

    @property
    def predicted_memory(self) -> Memory:
        """The same by the closed form."""
        return _largest(rank.predicted_memory for run in self.runs for rank in run.ranks)

    def per_rank(self, name: Literal["bytes_sent", "peak_memory_bytes"]) -> list[float]:
        """Return ``name`` of each rank that has it, averaged over the successful repeats."""
        means = []
        for ranks in zip(*(run.ranks for run in self.runs), strict=False):
            values = [getattr(rank, name) for rank in ranks]
            if None not in values:
                means.append(fmean(values))
        return means


Rows = Sequence[CellRow]


def steady(rows: Rows) -> list[CellRow]:
    """Return the rows that are not noisy, or all if all are; the fastest first."""
    quiet = list(filterfalse(attrgetter("noisy"), rows))
    return sorted(quiet or rows, key=attrgetter("seconds"))


def tied(rows: Rows) -> list[CellRow]:
    """Return the fastest row, and those whose intervals overlap its own; noisy ones come last."""
    best = steady(rows)[0]
    ends = best.interval("seconds")
    found = [best]
    for row in sorted(rows, key=attrgetter("noisy", "seconds")):
        own = row.interval("seconds")
        if row is not best and ends and own and own[0] <= ends[1]:
            found.append(row)
    return found


def _largest(memories: Iterable[Memory | None]) -> Memory:
    known = [memory for memory in memories if memory]
    return max(known, key=lambda memory: sum(memory.values()), default={})


@dataclass(frozen=True)
class ComparisonGroup:
    """Cells that differ only in strategy and number of nodes.

    suffix : of figures' names. settings : those that all groups share, and the group's own.
    """

    group: int
    rate: LinkRate | None
    label: str
    suffix: str
    rows: Rows
    emulated: bool
    settings: GroupSettings

    @property
    def weak(self) -> bool:
        return self.settings.scaling == "weak"

    @property
    def emulated_compute(self) -> bool:
        return _is_emulated(self.settings.compute)

    @property
    def measured(self) -> list[CellRow]:
        return [row for row in self.rows if row.step]

    @property
    def place(self) -> Place:
        """What the numbers of ``nodes`` count; see ``CellRow``."""
        return self.rows[-1].place if self.rows else "rank"

    @property
    def alone(self) -> Place:
        """What the cell of a single rank is called."""
        return self.rows[0].place if self.rows else "rank"

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node where there are several nodes."""
        return max((row.cell.ranks_per_node for row in self.rows), default=1)

    @property
    def each(self) -> str:
        """What continues a number of several nodes: " with 2 ranks each", or nothing."""
        return f" with {self.ranks_per_node} ranks each" if self.ranks_per_node > 1 else ""

    def size_text(self, nodes: int) -> str:
        """Return a number of nodes for a person: "4 nodes", "4 nodes with 2 ranks each"."""
        if nodes == 1:
            return count(nodes, self.alone)
        return count(nodes, self.place) + self.each

    @property
    def shared_nodes(self) -> list[str]:
        """Which ranks shared a node, for each such layout among the runs."""
        texts = [shared_nodes(run.ranks) for row in self.rows for run in row.runs]
        return [text for text in dict.fromkeys(texts) if text]

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
        nodes = self.nodes
        return sorted({row.sync for row in self.rows if row.nodes in nodes}, key=order)

    def at(self, nodes: int) -> list[CellRow]:
        """Return the measured cells on ``nodes`` nodes."""
        return [row for row in self.measured if row.nodes == nodes]

    def find(self, sync: str, nodes: int) -> CellRow | None:
        return next((row for row in self.rows if (row.sync, row.nodes) == (sync, nodes)), None)


def _is_emulated(compute: str | None) -> bool:
    return compute not in (None, "real")


def order(sync: str) -> tuple[int, str]:
    """Return the sort key of a strategy: known ones first, in their own order."""
    strategy = sync.partition("-")[0]  # "ddp-auto" follows "ddp"
    places = [*STRATEGIES, strategy]  # an unknown one finds itself at the end
    return places.index(strategy), sync


def blocks(comparison: Comparison) -> list[ComparisonGroup]:
    """Split the cells into comparable blocks; each block of a group has its one-node cell."""
    groups = sorted({cell.group for cell in comparison.cells})
    cells = grouped((cell.group, cell) for cell in comparison.cells)
    keys = [(group, rate) for group in groups for rate in _rates(cells[group])]
    several_groups = len(groups) > 1
    several_rates = len({rate for _, rate in keys}) > 1
    found = []
    for group, rate in keys:
        settings = comparison.known(group)
        imitated = rate is not None or settings.compute != "real"
        rows = _rows(
            comparison, cells[group], rate, emulated_compute=_is_emulated(settings.compute)
        )
        labels = []
        suffix = ""
        if several_groups:
            labels.append(_group_label(comparison, group))
            suffix += f"-group{group}"
        if several_rates:
            labels.append(link_text(rate))
            ending = rate if isinstance(rate, str) else link_text(rate)
            suffix += "-" + re.sub(r"[^\w.]+", "_", ending)
        found.append(
            ComparisonGroup(
                group=group,
                rate=rate,
                label=", ".join(labels),
                suffix=suffix,
                rows=rows,
                emulated=comparison.emulated and imitated,
                settings=settings,
            )
        )
    return found


def _rates(cells: Sequence[Cell]) -> list[LinkRate | None]:
    """Return the link rates between several nodes in a group, or else that of its first cell."""
    rates = list(dict.fromkeys(cell.rate for cell in cells if cell.nodes > 1))
    return rates or [cells[0].rate]


def _group_label(comparison: Comparison, group: int) -> str:
    """Return what sets a group apart as a person writes it, or its number."""
    own = comparison.groups.get(str(group), {})
    differing = [difference.split(":")[0] for difference in comparison.differences]
    apart = [f"{name.replace('_', ' ')} {own[name]}" for name in differing if name in own]
    return listed(apart, most=2) if apart else f"group {group}"


def _rows(
    comparison: Comparison,
    cells: Sequence[Cell],
    rate: LinkRate | None,
    *,
    emulated_compute: bool,
) -> list[CellRow]:
    """Return the rows of a block: a group's cells of this rate, and its one-node cell."""
    members = [cell for cell in cells if cell.nodes > 1 and cell.rate == rate]
    baseline = None
    by_iterations = _have_iterations(cells)
    singles = [cell for cell in cells if cell.nodes == 1]
    if singles:
        one = min(singles, key=lambda cell: cell.rate != rate)  # of this rate, or else of any
        members.append(one)
        baseline = CellRow(one, place=_place_alone(members), by_iterations=by_iterations)
    predicted: dict[str, PredictedCell] = {}
    if comparison.prediction is not None:
        predicted = comparison.prediction.cells
    rows = [
        CellRow(
            cell,
            baseline,
            predicted.get(cell.id),
            _place(members) if cell.nodes > 1 else _place_alone(members),
            emulated_compute,
            by_iterations,
            comparison.timelines.get(cell.id),
        )
        for cell in members
    ]
    return sorted(rows, key=lambda row: (row.nodes, order(row.sync)))


def _have_iterations(cells: Sequence[Cell]) -> bool:
    """Return whether every run recorded its mean iteration, so that all can be compared by it."""
    runs = [run for cell in cells if cell.medians is not None for run in cell.runs]
    return bool(runs) and all(run.mean_iteration_seconds for run in runs)


def _place(cells: Sequence[Cell]) -> Place:
    """Return "node" if no two ranks of any of these cells shared a machine."""
    several = [cell for cell in cells if cell.nodes > 1]
    apart = [_has_own_nodes(cell, run) for cell in several for run in cell.runs]
    linked = any(cell.rate is not None for cell in several)
    return "node" if all(apart) and (apart or linked) else "rank"


def _has_own_nodes(cell: Cell, run: Repeat) -> bool:
    """Return whether no two ranks of the run shared a node."""
    nodes = {rank.node for rank in run.ranks}
    if None not in nodes:
        return len(nodes) == cell.nodes
    # In older files each rank with a link has a network namespace.
    return cell.rate is not None or len({rank.host for rank in run.ranks}) == cell.nodes


def _place_alone(cells: Sequence[Cell]) -> Place:
    """Return what a single rank is called: no node where these have several ranks."""
    if any(cell.ranks_per_node > 1 for cell in cells):
        return "rank"
    return _place(cells)


def what_is_emulated(settings: GroupSettings) -> str:
    """Return a sentence that says what an emulated comparison imitated."""
    parts = []
    if _is_emulated(settings.compute):
        profile = str(settings.compute).rpartition("/")[2].removesuffix(".json")
        parts.append(
            f"layers and updates sleep for the times of profile '{profile}', so nothing is "
            "learned: there are no losses and no accuracies, and memory is without activations; "
            "step times, overlap, waiting and bytes are valid"
        )
    rates = [link_text(rate) for rate in settings.rates or [] if rate is not None]
    if rates:
        parts.append(
            f"the nodes are network namespaces of one machine, with links of {listed(rates)}"
        )
    if not parts:
        parts.append("network or compute were imitated on one machine")
    return f"EMULATED: {'; '.join(parts)}."


def small_text(value: float, digits: int = 2) -> str:
    """Return a number that may be tiny with few digits: ``0.017`` or ``2.6e-5``."""
    return f"{value:.{digits}g}".replace("e-0", "e-")


def link_text(rate: LinkRate | None) -> str:
    """Return a link rate as text; ``rate`` is bits per second, a text for ``--rate``, or None."""
    if isinstance(rate, str):
        try:
            return link_text(parse_rate(rate))
        except UserError:
            return rate
    if rate is None:
        return "unshaped"
    return rate_text(rate, digits=6)


def seconds_text(value: float, scale: float) -> str:
    """Return seconds with 3 decimals, or 4 or 5 if ``scale``, the step's time, is below 0.1 s."""
    if not scale or scale >= 0.1:
        return f"{value:.3f}"
    if scale >= 0.01:
        return f"{value:.4f}"
    return f"{value:.5f}"


def interval_text(ends: Interval | None, scale: float) -> str:
    """Return an interval in seconds as `` [0.351, 0.366]``, or an empty text without one."""
    if ends is None:
        return ""
    low, high = ends
    return f" [{seconds_text(low, scale)}, {seconds_text(high, scale)}]"
