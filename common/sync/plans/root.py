"""Plans of the strategies whose gradients all pass rank 0, the root."""

from collections.abc import Sequence

from common.sync.message_cost import COPIES_PER_PARAMETER, Operation, buffers
from common.sync.plans.base import ReplicatedPlan


class GatherScatterPlan(ReplicatedPlan):
    """For each parameter a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return _through_root(sizes, ranks, copies=COPIES_PER_PARAMETER)


class GatherScatterFlatPlan(ReplicatedPlan):
    """For each flat buffer a gather, which the root adds up, and a scatter."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return _through_root(buffers(sizes), ranks, copies=1)


def _through_root(sizes: Sequence[int], ranks: int, *, copies: int) -> list[Operation]:
    found = []
    for size in sizes:
        found += [
            Operation("gather", size, summed_bytes=(ranks - 1) * size, copied_bytes=copies * size),
            Operation("scatter", size),
        ]
    return found


class ReduceBroadcastPlan(ReplicatedPlan):
    """For each parameter a reduce and a broadcast."""

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        found = []
        for size in sizes:
            found += [Operation("reduce", size), Operation("broadcast", size)]
        return found
