"""How many bytes of tensors a rank holds between two steps, by kind: closed forms, no torch.

``predict_memory`` gives them; common/profiling/rank_memory.py measures the same kinds. With M bytes
of parameters on N ranks and an optimiser that keeps k values for each entry, a rank holds

    strategy                parameters   gradients   optimiser state   buckets
    all_reduce, ddp, ...         M            M            k M            0
    topk, ddp_powersgd           M            M            k M            M: what was not sent yet
    sharded                      M           M/N          k M/N          0
    ddp_zero1                    M             M          k M/N          0
    fsdp                         M/N           M/N        k M/N              0

Activations are not in it: they depend on the rank's batch, and are freed by the end of backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.profiling.records import Memory
from common.sync.bucketing import assign_buckets
from common.sync.message_cost import GradientSize
from common.sync.message_plans import is_compressed, layers_of, part_bytes, thin_entries
from common.utils.grouping import grouped

_STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of one float


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """What decides the bytes of a rank.

    Parameters
    ----------
    plan : the message plan of the strategy, for its bucket_mb or powersgd_rank.
    sizes : of the gradients, in the order of the parameters that train.
    opt, momentum : "sgd", which keeps no state without momentum, or "adamw".
    untrained : bytes of the model's buffers and frozen parameters, which every rank holds.
    """

    plan: Any
    sizes: Sequence[GradientSize]
    rank: int
    ranks: int
    opt: str
    momentum: float
    untrained: int = 0

    def state_bytes(self, sizes: Sequence[int]) -> int:
        """Return the optimiser's state for parameters, or parts of them, of these sizes."""
        if self.opt == "adamw":
            return 2 * sum(sizes) + _STEP_BYTES * len(sizes)
        return sum(sizes) if self.momentum else 0


def predict_memory(name: str, case: MemoryCase) -> Memory:
    """Return what the rank holds with strategy ``name``."""
    return _RULES.get(name, _replicated)(case) | {"untrained": case.untrained}


def _replicated(case: MemoryCase) -> Memory:
    """Every rank holds everything. A flat buffer or DDP's bucket is what ``p.grad`` views."""
    whole = sum(case.sizes)
    return {
        "parameters": whole,
        "gradients": whole,
        "optimizer_state": case.state_bytes(case.sizes),
        "buckets": 0,
    }


def _top_k(case: MemoryCase) -> Memory:
    return _replicated(case) | {"buckets": sum(case.sizes)}


def _powersgd(case: MemoryCase) -> Memory:
    """Besides the errors, which have the gradients' size, P and Q of each compressed gradient."""
    columns = case.plan.powersgd_rank
    thin = sum(
        sum(thin_entries(size.shape, columns)) * size.itemsize
        for size in case.sizes
        if is_compressed(size.shape, columns)
    )
    return _replicated(case) | {"buckets": sum(case.sizes) + thin}


def _flat_parts(
    case: MemoryCase, buckets: Sequence[Sequence[GradientSize]]
) -> tuple[int, list[int]]:
    """Return the bytes of the rank's part of each flat bucket together, and of its segments.

    Padding makes a bucket a multiple of N entries long; a parameter has a segment where a part
    holds some of it.
    """
    part_bytes, segments = 0, []
    for bucket in buckets:
        itemsize = bucket[0].itemsize
        part = -(-sum(size.entries for size in bucket) // case.ranks)
        part_bytes += part * itemsize
        end = -case.rank * part  # of the last parameter, counted from the begin of the rank's part
        for size in bucket:
            begin, end = end, end + size.entries
            segments.append(max(0, min(end, part) - max(begin, 0)) * itemsize)
    return part_bytes, [size for size in segments if size]


def _sharded(case: MemoryCase) -> Memory:
    ready_order = case.sizes[::-1]
    buckets = assign_buckets(ready_order, case.plan.bucket_mb)
    own, segments = _flat_parts(case, [[ready_order[i] for i in bucket] for bucket in buckets])
    return {
        "parameters": own * case.ranks,
        "gradients": own,
        "optimizer_state": case.state_bytes(segments),
        "buckets": 0,  # those of gradients are freed during backward
    }


def _zero1(case: MemoryCase) -> Memory:
    by_itemsize = grouped((size.itemsize, size) for size in case.sizes)
    own, segments = _flat_parts(case, [*by_itemsize.values()])
    return _replicated(case) | {
        "parameters": own * case.ranks,
        "optimizer_state": case.state_bytes(segments),
    }


def _fsdp(case: MemoryCase) -> Memory:
    """The rank's rows of each parameter; torch pads them to the same number on every rank.

    Of the whole parameter one entry stays, which every entry then reads. The gradients of a layer
    share memory, which is freed where the rank has no row of the layer.
    """
    parameters, gradients, own = 0, 0, []
    for layer in layers_of(case.sizes):
        padded = sum(part_bytes(size, case.ranks) for size in layer)
        mine = [size for one in layer if (size := _own_rows(one, case))]
        parameters += padded
        gradients += padded if mine else 0
        own += mine
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer_state": case.state_bytes(own),
        "buckets": sum(size.itemsize for size in case.sizes),
    }


def _own_rows(size: GradientSize, case: MemoryCase) -> int:
    """Return the bytes of the rank's rows of a parameter, without padding."""
    part = part_bytes(size, case.ranks)
    return max(0, min(part, size - case.rank * part))


_RULES: dict[str, Callable[[MemoryCase], Memory]] = {
    "topk": _top_k,
    "ddp_powersgd": _powersgd,
    "sharded": _sharded,
    "ddp_zero1": _zero1,
    "fsdp": _fsdp,
}
