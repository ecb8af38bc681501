"""How many bytes of tensors a rank holds between two steps, by kind: closed forms, no torch.

``predict_memory`` gives them; common/reporting/rank_memory.py measures the same kinds. With M bytes
of parameters on N ranks and an optimiser that keeps k values for each entry, a rank holds

    strategy                parameters   gradients   optimiser state   buckets
    all_reduce, ddp, ...         M            M            k M            0
    topk, ddp_powersgd           M            M            k M            M (what was not sent yet)

Activations are not in it: they depend on the rank's batch, and are freed by the end of backward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from common.sync import MESSAGE_PLANS, build_message_plan_from
from common.sync.bucket_plans import is_compressed, thin_entries
from common.sync.message_cost import GradientSize, with_shape

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


def predict_memory(
    name: str,
    options: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    rank: int,
    ranks: int,
    optimizer: OptimizerCost,
    untrained: int = 0,
) -> Memory | None:
    """Return what ``rank`` of ``ranks`` holds with strategy ``name``; None for an unknown one.

    Parameters
    ----------
    options : settings of the strategy, as ``build_message_plan_from`` takes them.
    sizes : of the gradients, in the order of the parameters that train.
    untrained : bytes of the model's buffers and frozen parameters, which every rank holds.
    """
    if name not in MESSAGE_PLANS:
        return None
    rule = _RULES.get(name, _replicated)
    shaped = [with_shape(size) for size in sizes]
    memory = rule(build_message_plan_from(name, options), shaped, rank, ranks, optimizer)
    return memory | {"untrained": untrained}


def _replicated(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> Memory:
    """Every rank holds everything. A flat buffer or DDP's bucket is what ``p.grad`` views."""
    whole = sum(sizes)
    return {
        "parameters": whole,
        "gradients": whole,
        "optimizer_state": state_bytes(sizes, optimizer),
        "buckets": 0,
    }


def state_bytes(sizes: Sequence[int], optimizer: OptimizerCost) -> int:
    """Return the bytes of state for parameters, or parts of them, of these sizes."""
    return optimizer.copies * sum(sizes) + optimizer.step_bytes * len(sizes)


def _top_k(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> Memory:
    return _replicated(plan, sizes, rank, ranks, optimizer) | {"buckets": sum(sizes)}


def _powersgd(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> Memory:
    """Besides the errors, which have the gradients' size, P and Q of each compressed gradient."""
    thin = sum(
        sum(thin_entries(size.shape, plan.powersgd_rank)) * size.itemsize
        for size in sizes
        if is_compressed(size.shape, plan.powersgd_rank)
    )
    return _replicated(plan, sizes, rank, ranks, optimizer) | {"buckets": sum(sizes) + thin}


_RULES: dict[str, Callable[..., Memory]] = {"topk": _top_k, "ddp_powersgd": _powersgd}
