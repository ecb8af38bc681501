"""Plans of the strategies with which each rank's optimiser updates 1/N of the parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.sync.bucketing import assign_buckets
from common.sync.memory_cost import Memory, MemoryCase, replicated
from common.sync.message_cost import GradientSize
from common.sync.plans.base import MessagePlan
from common.sync.plans.buckets import DDPPlan, bucket_option
from common.sync.plans.lines import (
    EARLIER_MICRO_BATCHES,
    PART,
    RANKS,
    ROWS,
    SIZE,
    PlanLine,
    for_each,
)
from common.sync.plans.pieces import layers_of, rows_bytes
from common.utils.grouping import grouped
from common.utils.limits import AboveZero


class DDPZero1Plan(DDPPlan):
    """As ``DDPPlan``, then an all_gather of the weights, in one flat buffer for each itemsize.

    A buffer is padded to N equal parts, one for each rank. The next forward needs all weights at
    once.
    """

    shards_update = True

    messages = DDPPlan.messages + for_each(
        "buffer", PlanLine("all_gather", PART, when="in forward")
    )

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: padded parameters, and 1/N of the optimiser's state."""
        by_itemsize = grouped((size.itemsize, size) for size in case.sizes)
        own, segments = _flat_parts(case, [*by_itemsize.values()])
        return replicated(case) | {
            "parameters": own * case.ranks,
            "optimizer_state": case.state_bytes(segments),
        }


@dataclass(kw_only=True)
class ShardedPlan(MessagePlan):
    """A reduce_scatter for each bucket of gradients, then an all_gather for each one of weights.

    A bucket is padded to N equal parts, one for each rank, and reduced as soon as backward has
    filled it. The gathers come in the order of forward, so the last bucket that was reduced is the
    first that is gathered.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket. The default is less than DDP's: the next forward begins
        when the first layers' bucket has arrived.
    """

    bucket_mb: AboveZero | None = bucket_option(1.0)
    shards_update = True
    leave = "leave half during backward and half during the next forward"

    messages = for_each(
        "bucket", PlanLine("reduce_scatter", RANKS * PART, copied=SIZE, when="in backward")
    ) + for_each("bucket", PlanLine("all_gather", PART, when="in forward"), reverse=True)

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: padded weights, and 1/N of mean gradients and optimiser's state.

        The buckets of gradients are freed during backward.
        """
        ready_order = case.sizes[::-1]
        shares = assign_buckets(ready_order, self.bucket_mb)
        own, segments = _flat_parts(case, [[ready_order[i] for i in share] for share in shares])
        return {
            "parameters": own * case.ranks,
            "gradients": own,
            "optimizer_state": case.state_bytes(segments),
            "buckets": 0,
            "untrained": case.untrained,
        }


_GATHER_LAYER = PlanLine("all_gather", ROWS, copied=RANKS * ROWS, only_if="layer by layer")
_REDUCE_LAYER = PlanLine("all_reduce", RANKS * ROWS, copied=RANKS * ROWS, only_if="layer by layer")
_FETCH = PlanLine("all_gather", PART, when="in forward", only_if="fetched ahead")
_FETCH_AGAIN = replace(_FETCH, when="in backward", ahead=True)
_REDUCE = PlanLine("reduce_scatter", RANKS * PART, when="in backward", only_if="fetched ahead")


@dataclass(kw_only=True)
class FSDPPlan(MessagePlan):
    """For each layer two all_gathers of weights, in forward and backward, and a reduce_scatter.

    Backward gathers a layer's weights before it reduces the last one.

    Each parameter is padded to N equal parts of whole rows. With Gloo a reduce_scatter is an
    all_reduce, and nothing overlaps with computing, so that it costs as much as if everything was
    sent after backward.

    accumulation_steps : micro-batches of a step. Each one gathers, the last one reduces.
    fetches_ahead : as with NCCL: weights are gathered beside computing, one unit ahead, and
        gradients are reduced as soon as a unit has them. A unit is a block of a model, here
        bytes as in DDP's buckets.
    """

    accumulation_steps: int = 1
    fetches_ahead: bool = False
    shards_update = True
    leave = "leave between the layers of both passes"
    caveat = (
        "with Gloo each layer waits for its messages; with NCCL units of 25 MiB are fetched one "
        "ahead, beside computing"
    )

    messages = (
        # forward and backward of the earlier micro-batches, then forward and backward of the last
        for_each("layer", replace(_GATHER_LAYER, count=2 * EARLIER_MICRO_BATCHES))
        + for_each("layer", _GATHER_LAYER)
        + for_each("layer", replace(_GATHER_LAYER, ahead=True), _REDUCE_LAYER, reverse=True)
        + for_each(
            "bucket", replace(_FETCH, when="after backward", count=2 * EARLIER_MICRO_BATCHES)
        )
        + for_each("bucket", _FETCH_AGAIN, _REDUCE)
        + for_each("bucket", _FETCH, reverse=True)
    )

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class: the rank's rows; torch pads them to the same number on every rank.

        Of the whole parameter one entry stays, which every entry then reads. The gradients of a
        layer share memory, which is freed where the rank has no row of the layer.
        """
        parameters = 0
        gradients = 0
        own: list[int] = []
        for layer in layers_of(case.sizes):
            padded = sum(rows_bytes(size, case.ranks) for size in layer)
            mine = [nbytes for size in layer if (nbytes := _own_rows_bytes(size, case))]
            parameters += padded
            if mine:
                gradients += padded
            own += mine
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer_state": case.state_bytes(own),
            "buckets": sum(size.itemsize for size in case.sizes),
            "untrained": case.untrained,
        }


def _flat_parts(
    case: MemoryCase, buckets: Sequence[Sequence[GradientSize]]
) -> tuple[int, list[int]]:
    """Return the bytes of the rank's part of each flat bucket together, and of its segments.

    Padding makes a bucket a multiple of N entries long; a parameter has a segment where a part
    holds some of it.
    """
    part_bytes = 0
    segments = []
    for bucket in buckets:
        itemsize = bucket[0].itemsize
        part = -(-sum(size.entries for size in bucket) // case.ranks)
        part_bytes += part * itemsize
        end = -case.rank * part  # of the last parameter, counted from the begin of the rank's part
        for size in bucket:
            begin = end
            end = end + size.entries
            entries = min(end, part) - max(begin, 0)
            if entries > 0:
                segments.append(entries * itemsize)
    return part_bytes, segments


def _own_rows_bytes(size: GradientSize, case: MemoryCase) -> int:
    """Return the bytes of the rank's rows of a parameter, without padding."""
    part = rows_bytes(size, case.ranks)
    return max(0, min(part, size - case.rank * part))
