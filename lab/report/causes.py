"""Why one strategy takes longer than another: steps between measured cells, which add up.

``decomposition`` leads from the slowest strategy to the fastest over measured ones, so that
neighbours differ in as few ``properties`` as possible; the seconds of its steps add up to the whole
difference. ``Gap`` says how much of a step is communication and how much is compute, which is
everything else. A strategy decides its communication; the machine decides most of its compute, and
how long ranks wait for each other. So ``why`` gives a cause only if the messages explain at least
half of a step, and says of several properties that they are not separated.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from common.say import factor_text, percent
from common.sync import STRATEGIES, plan_class
from common.sync.plans.base import MessagePlan
from lab.predict.variants import split_variant
from lab.report.timeline import hidden_seconds
from lab.report.view import CellRow, Interval, Rows, interval_text, order, seconds_text, steady

_BUSY = 1.5  # programs for each core; ranks alone make it 1 at most, unless they share cores
EQUAL_SHARE = 1.2  # report a rank 0 that sends more than this many times an equal share
_HALF = 0.5
_SMALL = 0.05  # of a step: run-to-run noise that one run of each cannot tell from a difference
_ASSIGNMENT = ("all_reduce", "ddp")  # compared even if the chain passes them by

# --- what sets strategies apart ---

# The words of each property, by what marks a plan; the first that it has, "" if it has no other.
_WORDS = {
    "way": {
        "node": "within nodes, then between them",
        "gather": "through rank 0",
        "reduce": "to rank 0 and back, added on the way",
        "tree": "up and down a tree",
        "halving_doubling": "in halves between pairs",
        "": "among all ranks",
    },
    "pieces": {
        "gradient": "a message a tensor",
        "layer": "messages a layer",
        "": "tensors joined in buffers",
    },
    "content": {
        "kept entries": "the largest entries",
        "P": "thin matrices",
        "entries": "entries of 2 bytes",
        "": "whole gradients",
    },
    "update": {"sharded": "each rank updates a part", "": "each rank updates all"},
    "code": {
        "PartThree": "PyTorch's wrapper",
        "by hand": "messages by hand",
        "": "the library's collectives",
    },
}


def properties(sync: str) -> dict[str, str]:
    """Return what sets a strategy apart, each property in words, by its plan.

    These are those of ``_WORDS``, when the messages leave, and the size of buckets. A strategy that
    is not this project's has a property that no other one has.
    """
    strategy, bucket_mb = split_variant(sync)
    if strategy not in STRATEGIES:
        return {"strategy": sync}
    plan = plan_class(strategy)
    marks = {"", STRATEGIES[strategy].part}
    if plan.shards_update:
        marks.add("sharded")
    for group in plan.messages:
        if group.each == "model":
            continue
        marks.add(group.each)
        if group.pattern:
            marks |= {group.pattern, "by hand"}
        for line in group.lines:
            marks |= {line.kind, line.among, *line.nbytes.of}
    found = {}
    for name, words in _WORDS.items():
        found[name] = next(text for mark, text in words.items() if mark in marks)
    found["leave"] = plan.leave
    if bucket_mb is not None:
        found["bucket"] = f"buckets of {bucket_mb} MiB"
    return found


def apart(first: str, second: str) -> list[str]:
    """Return the names of the properties in which two strategies differ."""
    different = properties(first).items() ^ properties(second).items()
    return sorted(dict(different), reverse=True)


# --- one difference ---


@dataclass(frozen=True)
class Gap:
    """The difference between the times of two cells on the same number of nodes.

    seconds : by which ``slower`` takes longer; negative in a chain that passes an even slower one.
    ``communication``, of which ``waiting`` and ``own_work`` are parts, is a share of the
    difference; the rest is compute.
    """

    faster: CellRow
    slower: CellRow

    @property
    def seconds(self) -> float:
        return self.slower.seconds - self.faster.seconds

    @property
    def interval(self) -> Interval | None:
        """The range of the difference over both 95 % intervals; None if one is of a single run."""
        first = self.faster.interval("seconds")
        last = self.slower.interval("seconds")
        if first is None or last is None:
            return None
        return last[0] - first[1], last[1] - first[0]

    @property
    def apart(self) -> list[str]:
        """The properties in which the two differ."""
        return apart(self.faster.sync, self.slower.sync)

    @property
    def communication(self) -> float:
        return self._share(self.slower.medians.sync - self.faster.medians.sync)

    @property
    def waiting(self) -> float:
        return self._share(self.slower.medians.wait - self.faster.medians.wait)

    @property
    def own_work(self) -> float:
        """What the strategies compute in sync; 0 where it is not separated from the messages."""
        slower = self.slower.own_work
        faster = self.faster.own_work
        if slower is None or faster is None:
            return 0.0
        return self._share(slower - faster)

    def _share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def by_messages(self) -> bool:
        """Whether what the ranks send explains at least half of the difference."""
        exchange = self.communication - self.own_work
        if exchange < _HALF or busy(self.faster) != busy(self.slower):
            return False
        return exchange >= 2 * self.waiting

    @property
    def uncertain(self) -> bool:
        """Whether the difference may be noise: small for one run each, or intervals overlap."""
        if self.interval is None:
            return abs(self.seconds) < _SMALL * self.faster.seconds
        low, high = self.interval
        return low <= 0 <= high


# --- a chain of differences ---


def _route(start: str, end: str, syncs: Iterable[str]) -> list[str]:
    """Return the way from start to end over other strategies whose steps differ in least at once.

    A step costs the square of the number of properties in which its ends differ.
    """
    cost: dict[str, float] = defaultdict(lambda: math.inf, {start: 0})
    before: dict[str, str] = {}
    left = {*syncs, start, end}
    while end in left:
        place = min(sorted(left, key=order), key=cost.__getitem__)
        left.remove(place)
        for other in left:
            through = cost[place] + max(1, len(apart(place, other)) ** 2)
            if through < cost[other]:
                cost[other] = through
                before[other] = place
    way = [end]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def whole(rows: Rows) -> Gap:
    """Return the whole difference: of the slowest steady one of ``rows`` and the fastest."""
    in_order = steady(rows)
    return Gap(faster=in_order[0], slower=in_order[-1])


def decomposition(rows: Rows) -> list[Gap]:
    """Return the steps from the slowest steady one of ``rows`` to the fastest, over others.

    Their seconds add up to the difference of the two.
    """
    most = whole(rows)
    named = {row.sync: row for row in steady(rows)}
    way = _route(most.slower.sync, most.faster.sync, named)
    return [Gap(faster=named[after], slower=named[before]) for before, after in pairwise(way)]


def beside(rows: Rows, steps: Sequence[Gap]) -> list[Gap]:
    """Return how cells outside a chain compare with the one of it that differs in least.

    Also the assignment's all_reduce against its ddp, if both are there and no step of the chain.
    """
    passed = [steady(rows)[0], *(gap.slower for gap in steps)]
    found = []
    for row in steady(rows):
        if row not in passed:
            near = min(passed, key=lambda other: len(apart(row.sync, other.sync)))
            found.append(_in_order(near, row))
    named = {row.sync: row for row in rows}
    if set(_ASSIGNMENT) <= named.keys():
        found.append(_in_order(*(named[sync] for sync in _ASSIGNMENT)))
    return [gap for gap in dict.fromkeys(found) if gap not in steps]


def _in_order(first: CellRow, second: CellRow) -> Gap:
    if first.seconds < second.seconds:
        return Gap(faster=first, slower=second)
    return Gap(faster=second, slower=first)


def missing(gap: Gap) -> list[str]:
    """Return strategies whose runs would split a difference into single properties, if any."""
    way = _route(gap.slower.sync, gap.faster.sync, STRATEGIES.keys() - {"none"})
    return way[1:-1]


# --- in words ---


def reasons(rows: Rows) -> list[str]:
    """Say what makes the slowest take longer than the fastest, the greatest step first.

    Of a single one, what its messages do.
    """
    steps = decomposition(rows)
    if not steps:
        return [f"The messages {messages(steady(rows)[0])}."]
    if len(steps) == 1:
        return [why(steps[0])]
    most = whole(rows)
    lines = [f"{difference(most)}, in {len(steps)} steps that add up to it:"]
    for gap in sorted(steps, key=attrgetter("seconds"), reverse=True):
        share = percent(gap.seconds / most.seconds)
        lines.append(f"{share}: {difference(gap)}. {why(_in_order(gap.slower, gap.faster))}")
    return lines


def difference(gap: Gap) -> str:
    """Return the seconds that the second of two strategies saves, with their interval."""
    scale = gap.faster.step
    saved = f"{seconds_text(gap.seconds, scale)} s{interval_text(gap.interval, scale)}"
    return f"{saved} from {gap.slower.sync} to {gap.faster.sync}"


def compared(gap: Gap) -> str:
    """Return how two times compare: ``1.74 times as fast as ring``, or only the other time."""
    slower = gap.slower
    if gap.by_messages:
        return f"{factor_text(slower.seconds / gap.faster.seconds)} times as fast as {slower.sync}"
    return f"against {seconds_text(slower.seconds, gap.faster.step)} s of {slower.sync}"


def why(gap: Gap) -> str:
    """Say what makes the difference, as far as the two cells show it."""
    sent = f"messages {_messages_of_both(gap.faster, gap.slower)}."
    if gap.uncertain:
        return f"The difference lies within the noise. The {sent}"
    if gap.by_messages:
        share = _of_it(gap.communication)
        text = f"{_what_differs(gap)}Why: the {sent} Communication is {share} of the difference."
        if "content" in gap.apart and None in (gap.faster.own_work, gap.slower.own_work):
            text += " What the strategies compute for it is not separated: no step was recorded."
        return text
    exposed = _each(gap, gap.faster.medians.sync, gap.slower.medians.sync)
    return f"{_not_the_messages(gap)} Exposed communication, the strategy's own part, is {exposed}."


_LABELS = {"way": "gradients go ", "leave": "messages "}


def _what_differs(gap: Gap) -> str:
    """Name the property in which two strategies differ; of several, why they are not separated."""
    ours = properties(gap.faster.sync)
    theirs = properties(gap.slower.sync)
    texts = []
    for name in gap.apart:
        new = ours.get(name, "the usual")
        old = theirs.get(name, "the usual").removeprefix("leave ")
        texts.append(f"{_LABELS.get(name, '')}{new}, not {old}")
    text = f"What differs: {'; '.join(texts)}. "
    if len(texts) < 2:
        return text
    lacking = " or ".join(missing(gap)) or "a strategy between them"
    text += f"They are not separated: no run of {lacking}. "
    step = gap.faster.timeline
    if "leave" in gap.apart and step is not None and step.ranks:
        hidden = seconds_text(hidden_seconds(step.ranks), gap.faster.step)
        text += f"In the recorded step backward hides {hidden} s of {gap.faster.sync}'s messages. "
    return text


def _not_the_messages(gap: Gap) -> str:
    """Say what most of the difference is, where the messages do not explain it."""
    slower = gap.slower
    if _threads(gap.faster) != _threads(slower):
        return (
            f"The ranks of {gap.faster.sync} had {_threads(gap.faster)} threads, those of "
            f"{slower.sync} {_threads(slower)}: their compute cannot be compared."
        )
    if gap.communication < _HALF:
        text = (
            f"{_of_it(1 - gap.communication, first=True)} of the difference is compute: the "
            f"machine's noise, or what {slower.sync} does within backward, such as copying"
        )
        if leaving(slower) != MessagePlan.leave:
            text += f"; its messages {leaving(slower)} and share the cores with it"
        return f"{text}."
    if gap.own_work >= _HALF:
        return (
            f"{_of_it(gap.own_work, first=True)} of the difference is what the strategies compute "
            "between their messages, as compressing, adding and copying: "
            f"{_each(gap, gap.faster.own_work, slower.own_work)}."
        )
    if busy(gap.faster) or busy(slower):
        return "The machine was not equally busy, so the difference does not show the strategies."
    return (
        f"{_of_it(gap.waiting, first=True)} of the difference is waiting for slower ranks, whose "
        "compute took longer: the machine's noise, not the messages."
    )


def _each(gap: Gap, faster: float | None, slower: float | None) -> str:
    """Return these seconds of both strategies."""
    short = seconds_text(faster or 0.0, gap.faster.step)
    long = seconds_text(slower or 0.0, gap.slower.step)
    return f"{short} s with {gap.faster.sync} and {long} s with {gap.slower.sync}"


def _of_it(share: float, *, first: bool = False) -> str:
    """Return a share of the difference; more than all of it is all."""
    if share < 0.995:
        return percent(share)
    return "All" if first else "all"


def _threads(row: CellRow) -> str:
    return " or ".join(sorted({str(rank.threads) for run in row.runs for rank in run.ranks}))


def load(row: CellRow) -> float:
    """Return the largest load per core at the end of a cell's runs; 0 if none is known."""
    return max(row.recorded("load_per_core"), default=0.0)


def busy(row: CellRow) -> bool:
    """Return whether other programs took a part of the machine at the end of a run."""
    return load(row) > _BUSY


def leaving(row: CellRow) -> str:
    """Return when the strategy's messages leave, to continue "the messages"."""
    return properties(row.sync).get("leave", MessagePlan.leave)


def _messages_of_both(faster: CellRow, slower: CellRow) -> str:
    """Say what the messages of two strategies do, once if they do the same."""
    does = _messages_do(faster)
    if does != _messages_do(slower):
        return f"{messages(faster)} and those {messages(slower)}"
    exposed = seconds_text(faster.medians.sync, faster.step)
    also = seconds_text(slower.medians.sync, slower.step)
    both = f"{faster.sync} and {slower.sync}"
    return f"of {both} {does} ({exposed} and {also} s of a step are exposed)"


def messages(row: CellRow) -> str:
    """Say when a strategy's messages leave, or what passes rank 0's link, and what this costs."""
    exposed = seconds_text(row.medians.sync, row.step)
    return f"of {row.sync} {_messages_do(row)} ({exposed} s of a step are exposed)"


def _messages_do(row: CellRow) -> str:
    root_is_busy = (row.root_share or 0.0) > EQUAL_SHARE / row.nodes
    if row.cell.ranks_per_node > 1 and row.busiest_link_bytes is not None:
        link = "node 0's link" if root_is_busy else "each node's link"
        megabytes = 1e-6 * row.busiest_link_bytes
        return f"put {megabytes:.0f} MB a step through {link} each way"
    if root_is_busy and row.bytes_sent:  # rank 0 receives as much as it sends
        megabytes = 2e-6 * row.bytes_sent[0]
        return f"put {megabytes:.0f} MB a step through rank 0's link"
    return leaving(row)
