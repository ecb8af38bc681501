"""How many bytes of tensors a rank holds between two steps, by kind: closed forms, no torch.

``predict_memory`` gives them; common/reporting/rank_memory.py measures the same kinds. With M bytes
of parameters on N ranks and an optimiser that keeps k values for each entry, a rank holds

    strategy                parameters   gradients   optimiser state   buckets
    all_reduce, ddp, ...         M            M            k M            0
    topk, ddp_powersgd           M            M            k M            M: what was not sent yet
    sharded                      M           M/N          k M/N          0
    ddp_zero1                    M             M          about k M/N        0
    fsdp                         M/N           M/N        k M/N              0

Activations are not in it: they depend on the rank's batch, and are freed by the end of backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.sync import MESSAGE_PLANS
from common.sync.bucket_plans import is_compressed, thin_entries
from common.sync.bucketing import assign_buckets
from common.sync.built_in_plans import layers_of, part_bytes, shares_of
from common.sync.message_cost import GradientSize

Memory = dict[str, int]
"""Bytes of tensors on one rank by kind, one of ``KINDS``; each storage is counted once."""

KINDS = {
    "parameters": "parameters",  # those that train
    "gradients": "gradients",  # what ``p.grad`` views, a flat buffer or DDP's buckets too
    "optimizer_state": "optimiser state",
    "buckets": "other buckets",  # what else the strategy keeps
    "untrained": "buffers and frozen",
}
"""What each kind is called for a person."""

_STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of one float


class OptimizerCost(NamedTuple):
    """What an optimiser keeps: values for each entry, and bytes for each parameter besides."""

    copies: int
    step_bytes: int


def optimizer_cost(opt: str, momentum: float) -> OptimizerCost:
    """Return the state of "sgd", which keeps none without ``momentum``, or of "adamw"."""
    return OptimizerCost(2, _STEP_BYTES) if opt == "adamw" else OptimizerCost(int(momentum > 0), 0)


def total(memory: Memory) -> int:
    """Return the bytes of all kinds."""
    return sum(memory.values())


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """What decides the bytes of a rank.

    Parameters
    ----------
    plan : the strategy or its message plan, for its bucket_mb or powersgd_rank.
    sizes : of the gradients, in the order of the parameters that train.
    untrained : bytes of the model's buffers and frozen parameters, which every rank holds.
    """

    plan: Any
    sizes: Sequence[GradientSize]
    rank: int
    ranks: int
    optimizer: OptimizerCost
    untrained: int = 0

    def state_bytes(self, sizes: Sequence[int]) -> int:
        """Return the optimiser's state for parameters, or parts of them, of these sizes."""
        return self.optimizer.copies * sum(sizes) + self.optimizer.step_bytes * len(sizes)


def predict_memory(name: str, case: MemoryCase) -> Memory | None:
    """Return what the rank holds with strategy ``name``; None for one that this file lacks."""
    if name not in MESSAGE_PLANS:
        return None
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


def _sharded(case: MemoryCase) -> Memory:
    """The rank's part of each flat bucket, which padding makes a multiple of N entries long."""
    ready_order = case.sizes[::-1]
    part_bytes, segments = 0, []
    for bucket in assign_buckets(ready_order, case.plan.bucket_mb):
        itemsize = ready_order[bucket[0]].itemsize
        part = -(-sum(ready_order[index].entries for index in bucket) // case.ranks)
        part_bytes += part * itemsize
        end = -case.rank * part  # of the last parameter, counted from the begin of the rank's part
        for index in bucket:
            begin, end = end, end + ready_order[index].entries
            segments.append(max(0, min(end, part) - max(begin, 0)) * itemsize)
    return {
        "parameters": part_bytes * case.ranks,
        "gradients": part_bytes,
        "optimizer_state": case.state_bytes([size for size in segments if size]),
        "buckets": 0,  # those of gradients are freed during backward
    }


def _zero1(case: MemoryCase) -> Memory:
    """Whole parameters belong to a rank, so the state is not exactly 1/N."""
    own = [case.sizes[index] for index in shares_of(case.sizes, case.ranks)[case.rank]]
    return _replicated(case) | {"optimizer_state": case.state_bytes(own)}


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
