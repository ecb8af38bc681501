"""Why one strategy takes longer than another: its communication, or what no strategy decides.

``Gap`` splits the difference of two steps into communication on the wire, waiting for slower ranks,
and compute, which is everything else in a step. A strategy decides its communication; the machine
decides most of its compute, and how long ranks wait for each other. So ``why`` gives a cause only
if the messages explain at least half of the difference, and ``compared`` gives a ratio only then.
"""

from dataclasses import dataclass

from common.say import factor_text, percent
from common.sync import STRATEGIES, plan_class
from common.sync.plans.base import MessagePlan
from lab.report.view import CellRow, seconds_text

BUSY = 1.5  # programs for each core; ranks alone make it 1 at most, unless they share cores
EQUAL_SHARE = 1.2  # report a rank 0 that sends more than this many times an equal share
_HALF = 0.5
_SMALL = 0.05  # of a step: run-to-run noise that one run of each cannot tell from a difference


@dataclass(frozen=True)
class Gap:
    """The difference between the steps of two cells, of which ``slower`` takes longer.

    ``communication``, ``waiting`` (a part of it) and ``compute`` are shares of the difference.
    """

    faster: CellRow
    slower: CellRow

    @property
    def seconds(self) -> float:
        return self.slower.step - self.faster.step

    @property
    def communication(self) -> float:
        return self._share(self.slower.medians.sync - self.faster.medians.sync)

    @property
    def waiting(self) -> float:
        return self._share(self.slower.medians.wait - self.faster.medians.wait)

    @property
    def compute(self) -> float:
        return 1 - self.communication

    def _share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def by_messages(self) -> bool:
        """Whether what the ranks send explains at least half of the difference."""
        sending = self.communication - self.waiting
        return self.communication >= _HALF and sending >= self.waiting and not self._one_was_busy

    @property
    def _one_was_busy(self) -> bool:
        return (load(self.faster) > BUSY) != (load(self.slower) > BUSY)

    @property
    def uncertain(self) -> bool:
        """Whether the difference may be noise: small for one run each, or intervals overlap."""
        first = self.faster.interval("step")
        last = self.slower.interval("step")
        if first is None or last is None:
            return self.seconds < _SMALL * self.faster.step
        return last[0] <= first[1]


def compared(faster: CellRow, slower: CellRow) -> str:
    """Return how two steps compare: ``1.74 times as fast as ring``, or only their times."""
    if Gap(faster, slower).by_messages:
        return f"{factor_text(slower.step / faster.step)} times as fast as {slower.sync}"
    return f"against {seconds_text(slower.step, faster.step)} s of {slower.sync}"


def why(gap: Gap) -> str:
    """Say what makes the difference, as far as the two cells show it."""
    if gap.uncertain:
        return f"The messages {messages(gap.faster)} and those {messages(gap.slower)}."
    if gap.by_messages:
        return (
            f"Why: the messages {messages(gap.faster)} and those {messages(gap.slower)}. "
            f"Communication is {_of_it(gap.communication)} of the difference."
        )
    return f"{_not_the_messages(gap)} {_exposed(gap)}"


def _not_the_messages(gap: Gap) -> str:
    """Say what most of the difference is, where the messages do not explain it."""
    slower = gap.slower
    threads = [_threads(row) for row in (gap.faster, slower)]
    if threads[0] != threads[1]:
        return (
            f"The ranks of {gap.faster.sync} had {_list_threads(threads[0])}, those of "
            f"{slower.sync} {_list_threads(threads[1])}: their compute cannot be compared."
        )
    if gap.communication < _HALF:
        return f"{_of_it(gap.compute, first=True)} of the difference is compute: {_compute(gap)}."
    if load(gap.faster) > BUSY or load(slower) > BUSY:
        return "The machine was not equally busy, so the difference does not show the strategies."
    return (
        f"{_of_it(gap.waiting, first=True)} of the difference is waiting for slower ranks, whose "
        "compute took longer: the machine's noise, not the messages."
    )


def _compute(gap: Gap) -> str:
    """Say what compute that takes longer shows: the machine's noise, unless messages share it."""
    slower = gap.slower
    repeated = min(len(gap.faster.runs), len(slower.runs)) > 1
    if leaving(slower) != MessagePlan.leave:
        return (
            f"the machine's noise, or the messages of {slower.sync}, which {leaving(slower)} and "
            "share the cores with it"
        )
    if repeated:
        return f"the machine was slower during the runs of {slower.sync}; it is not the strategy"
    return "the machine's noise, not the strategy"


def _exposed(gap: Gap) -> str:
    rows = (gap.faster, gap.slower)
    texts = [f"{seconds_text(row.medians.sync, row.step)} s with {row.sync}" for row in rows]
    return f"Exposed communication, the strategy's own part, is {texts[0]} and {texts[1]}."


def _of_it(share: float, *, first: bool = False) -> str:
    """Return a share of the difference; more than all of it is all."""
    if share < 0.995:
        return percent(share)
    return "All" if first else "all"


def _threads(row: CellRow) -> list[int]:
    return sorted({rank.threads for run in row.runs for rank in run.ranks})


def _list_threads(threads: list[int]) -> str:
    text = " or ".join(map(str, threads))
    return f"{text} thread" if threads == [1] else f"{text} threads"


def load(row: CellRow) -> float:
    """Return the largest load per core at the end of a cell's runs; 0 if none is known."""
    loads = [run.load_per_core for run in row.runs if run.load_per_core is not None]
    return max(loads, default=0.0)


def leaving(row: CellRow) -> str:
    """Return when the strategy's messages leave, to continue "the messages"."""
    strategy = row.sync.partition("-")[0]
    if strategy not in STRATEGIES:
        return MessagePlan.leave
    return plan_class(strategy).leave


def messages(row: CellRow) -> str:
    """Say when a strategy's messages leave, or what passes rank 0's link, and what this costs."""
    exposed = f"({seconds_text(row.medians.sync, row.step)} s of a step are exposed)"
    root_is_busy = (row.root_share or 0.0) > EQUAL_SHARE / row.nodes
    if row.cell.ranks_per_node > 1 and row.busiest_link_bytes is not None:
        link = "node 0's link" if root_is_busy else "each node's link"
        megabytes = 1e-6 * row.busiest_link_bytes
        return f"of {row.sync} put {megabytes:.0f} MB a step through {link} each way {exposed}"
    if root_is_busy:  # rank 0 receives as much as it sends
        megabytes = 2e-6 * (row.medians.root_bytes_sent or 0.0)
        return f"of {row.sync} put {megabytes:.0f} MB a step through rank 0's link {exposed}"
    return f"of {row.sync} {leaving(row)} {exposed}"
