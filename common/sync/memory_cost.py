"""How many bytes of tensors a rank holds between two steps, by kind. Imports no torch.

Each message plan has the closed form of its strategy as ``memory``; rank_memory.py in
common/profiling measures the same kinds. With M bytes of parameters on N ranks and an optimiser
that keeps k values for each entry, a rank holds

    strategy                parameters   gradients   optimiser state   buckets
    all_reduce, ddp, ...         M            M            k M            0
    topk, ddp_powersgd           M            M            k M            M: what was not sent yet
    sharded                      M           M/N          k M/N          0
    ddp_zero1                    M             M          k M/N          0
    fsdp                         M/N           M/N        k M/N              0

Activations are not in it: they depend on the rank's batch, and are freed by the end of backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from common.sync.message_cost import GradientSize
from common.utils.typed_json import Count

Kind = Literal["parameters", "gradients", "optimizer_state", "buckets", "untrained"]
KINDS: dict[Kind, str] = {
    "parameters": "parameters",  # those that train
    "gradients": "gradients",  # what ``p.grad`` views, a flat buffer or DDP's buckets too
    "optimizer_state": "optimiser state",
    "buckets": "other buckets",  # what else the strategy keeps
    "untrained": "buffers and frozen",
}
"""What each kind of tensors is called for a person."""

Memory = Annotated[dict[Kind, Count], Meta(min_length=len(KINDS))]
"""Bytes of tensors on one rank by kind; each storage is counted once."""

_STEP_BYTES = 4  # AdamW counts the steps of each parameter in a tensor of one float


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """What decides the bytes of a rank, beside its plan.

    Parameters
    ----------
    sizes : of the gradients, in the order of the parameters that train.
    opt, momentum : "sgd", which keeps no state without momentum, or "adamw".
    untrained : bytes of the model's buffers and frozen parameters, which every rank holds.
    """

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


def replicated(case: MemoryCase) -> Memory:
    """Return what a rank holds if every rank holds everything.

    A flat buffer or DDP's bucket is what ``p.grad`` views, so it counts as the gradients.
    """
    whole = sum(case.sizes)
    return {
        "parameters": whole,
        "gradients": whole,
        "optimizer_state": case.state_bytes(case.sizes),
        "buckets": 0,
        "untrained": case.untrained,
    }
