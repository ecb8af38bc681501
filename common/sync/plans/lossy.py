"""Plans of the strategies that send less than the whole gradient, or less often."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from common.sync.memory_cost import Memory, MemoryCase, replicated
from common.sync.plans.base import MessagePlan, ReplicatedPlan, option
from common.sync.plans.buckets import SEARCH_FOR_UNUSED
from common.sync.plans.lines import (
    ITEMSIZE,
    KEPT_ENTRIES,
    RANKS,
    SIZE,
    UNCOMPRESSED,
    P,
    PlanLine,
    Q,
    for_each,
)
from common.sync.plans.pieces import is_compressed, kept_entries, thin_entries
from common.utils.limits import Fraction, Positive

INDEX_BYTES = 4  # an int32 finds any entry of a flat buffer up to 8 GB


@dataclass(kw_only=True)
class TopKPlan(MessagePlan):
    """For each flat buffer an all_gather of the largest entries, and one of their indices.

    Each rank adds its residual and searches, then adds the parts of all ranks.

    Parameters
    ----------
    topk_ratio : fraction of the entries to send, above 0 and at most 1.
    """

    topk_ratio: Fraction = option(0.01, "share of the gradient's entries that a rank sends")
    caveat = (
        "what it computes is typical of such processors (priors.toml); no calibration measures it"
    )

    messages = for_each(
        "buffer",
        PlanLine("all_gather", ITEMSIZE * KEPT_ENTRIES, compressor="search", compressed=SIZE),
        PlanLine("all_gather", INDEX_BYTES * KEPT_ENTRIES, summed=RANKS * ITEMSIZE * KEPT_ENTRIES),
    )

    def count(self, entries: int) -> int:
        """Return how many of ``entries`` are sent."""
        return kept_entries(entries, self.topk_ratio)

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: also the residual, which has the gradients' size."""
        return replicated(case) | {"buckets": sum(case.sizes)}


@dataclass(kw_only=True)
class DDPPowerSGDPlan(MessagePlan):
    """Three all_reduces for each itemsize: uncompressed gradients, all P, all Q.

    This is what every step from the third on sends. The first line has what products and errors
    compute.

    Parameters
    ----------
    powersgd_rank : the columns of P and Q.
    find_unused_parameters : as that of ``DDPPlan``.
    """

    powersgd_rank: Annotated[int, Meta(ge=1, le=1024)] = option(
        2, "rank of the matrices that approximate a gradient"
    )
    find_unused_parameters: bool = False
    caveat = TopKPlan.caveat

    messages = (
        for_each(
            "buffer",
            PlanLine("all_reduce", UNCOMPRESSED, compressor="project", compressed=SIZE),
            PlanLine("all_reduce", P),
            PlanLine("all_reduce", Q),
        )
        + SEARCH_FOR_UNUSED
    )

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: also the errors, of the gradients' size, and P and Q of each one."""
        buckets: int = sum(case.sizes)
        for size in case.sizes:
            if is_compressed(size.shape, self.powersgd_rank):
                entries = thin_entries(size.shape, self.powersgd_rank)
                buckets += sum(entries) * size.itemsize
        return replicated(case) | {"buckets": buckets}


@dataclass(kw_only=True)
class LocalSGDPlan(ReplicatedPlan):
    """Every ``averaging_period`` steps an all_reduce for each flat buffer of weights.

    Parameters
    ----------
    averaging_period : steps from one average to the next.
    """

    averaging_period: Positive = option(4, "steps between two averages of the weights")
    leave = "leave once in several steps"

    messages = for_each("buffer", PlanLine("all_reduce", SIZE, copied=2 * SIZE))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.period = self.averaging_period
