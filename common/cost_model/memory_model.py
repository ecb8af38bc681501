"""How many bytes of tensors a rank holds between two steps, by kind: closed forms, no torch.

``predict_memory`` gives them; common/reporting/rank_memory.py measures the same kinds. With M bytes
of parameters on N ranks and an optimiser that keeps k values for each entry, a rank holds

    strategy                parameters   gradients   optimiser state   buckets
    all_reduce, ddp, ...         M            M            k M            0
    topk, ddp_powersgd           M            M            k M            M (what was not sent yet)

Activations are not in it: they depend on the rank's batch, and are freed by the end of backward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from common.sync import MESSAGE_PLANS, build_message_plan_from
from common.sync.bucket_plans import is_compressed, thin_entries
from common.sync.message_cost import GradientSize, with_shape
from common.utils.typed_json import Count


class Memory(TypedDict):
    """Bytes of tensors on one rank, each storage counted once.

    parameters : that train. gradients : what ``p.grad`` views. optimizer_state : momentum and
    alike. buckets : what else the strategy keeps. untrained : buffers and frozen parameters.
    """

    parameters: Count
    gradients: Count
    optimizer_state: Count
    buckets: Count
    untrained: Count


KINDS = tuple(Memory.__annotations__)
_STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of one float


class OptimizerCost(TypedDict):
    """Bytes of state that an optimiser keeps."""

    copies: int  # values for each entry of the parameters
    step_bytes: int  # for each parameter besides


def optimizer_cost(opt: str, momentum: float) -> OptimizerCost:
    """Return the state of "sgd" (``momentum`` 0 keeps none) or "adamw"."""
    if opt == "adamw":
        return OptimizerCost(copies=2, step_bytes=_STEP_BYTES)
    return OptimizerCost(copies=int(momentum > 0), step_bytes=0)


def total(memory: Mapping[str, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(memory[kind] for kind in KINDS)


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
    return Memory(**(memory | {"untrained": untrained}))


def _replicated(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> dict[str, int]:
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
    return optimizer["copies"] * sum(sizes) + optimizer["step_bytes"] * len(sizes)


def _top_k(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> dict[str, int]:
    return _replicated(plan, sizes, rank, ranks, optimizer) | {"buckets": sum(sizes)}


def _powersgd(
    plan: Any, sizes: Sequence[GradientSize], rank: int, ranks: int, optimizer: OptimizerCost
) -> dict[str, int]:
    """Besides the errors, which have the gradients' size, P and Q of each compressed gradient."""
    thin = sum(
        sum(thin_entries(size.shape, plan.powersgd_rank)) * size.itemsize
        for size in sizes
        if is_compressed(size.shape, plan.powersgd_rank)
    )
    return _replicated(plan, sizes, rank, ranks, optimizer) | {"buckets": sum(sizes) + thin}


_RULES: dict[str, Callable[..., dict[str, int]]] = {"topk": _top_k, "ddp_powersgd": _powersgd}
