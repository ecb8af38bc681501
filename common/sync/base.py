"""The contract of a strategy: defaults that most strategies keep, and which gradients they exchange.

Order of the calls: ``prepare`` once; in every step ``synchronize`` after the last backward and ``after_step`` after the
optimiser's step; ``sync_replicas`` before evaluation and checkpoint; ``close`` at the end.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError
from common.sync.message_plans import MessagePlan


class GradientSync(MessagePlan):
    """Base class of all strategies; a strategy mostly overrides ``synchronize`` alone. What it sends is in its plan
    (message_plans.py), from which it derives, too: ``operations``, ``bytes_sent`` and ``period``.

    After ``synchronize`` every rank's ``p.grad`` is the plain mean of the ranks' gradients. The engine weights each
    rank's loss, so that this mean is the gradient of the mean loss over the whole global batch.
    """

    exact = True
    """False: lossy or periodic; such a strategy says what it keeps instead."""

    equal_gradients = True
    """Whether ``synchronize`` leaves the same gradients on every rank, so that all see an overflow alike."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._local_pattern: list[bool] | None = None
        self._used: list[bool] = []

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Give every rank rank 0's parameters and buffers; return the module to call in training.

        Called before the first step; harmless when called again.
        """
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._local_pattern = None
        broadcast_from_rank0([*model.parameters(), *model.buffers()])
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Around forward and backward of every micro-batch but the last of an accumulation."""
        return nullcontext()

    def synchronize(self, model: nn.Module) -> None:
        """Replace every gradient by its mean over the ranks; after the last backward, before unscale, clip and step."""

    def after_step(self, model: nn.Module) -> None:
        """After the optimiser's step; periodic strategies average the weights here."""

    def sync_replicas(self, model: nn.Module) -> None:
        """Make weights and the optimiser's state equal on all ranks, before evaluation or a checkpoint; where ``synchronize``
        keeps them equal there is nothing to do. Collective."""

    settle = sync_replicas
    """Older name of ``sync_replicas``, for one release."""

    def __init_subclass__(cls) -> None:
        """Let a class that defines one of ``sync_replicas`` and ``settle`` have both."""
        super().__init_subclass__()
        if "sync_replicas" in vars(cls):
            cls.settle = cls.sync_replicas
        elif "settle" in vars(cls):
            cls.sync_replicas = cls.settle  # type: ignore[method-assign]  # an alias, made on purpose

    def close(self) -> None:
        """Remove what ``prepare`` attached to the model."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank must keep for an exact resume, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""

    def gradients(self) -> list[Tensor]:
        """The gradients of ``exchanged``, zeros where this rank has none."""
        gradients = []
        for parameter in self.exchanged():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def exchanged(self) -> list[nn.Parameter]:
        """The parameters whose gradients are exchanged, the same list on every rank, each once (tied ones too).

        A gradient that is None on some ranks counts as zero there; one that is None on all ranks stays None, so that
        the optimiser skips it as it would in one process. The ranks agree on this in the first step.

        Raises UserError naming the parameter if a later step has other gradients than the first.
        """
        pattern = [p.grad is not None for p in self._parameters.values()]
        if self._local_pattern is None:
            self._local_pattern, self._used = pattern, _used_anywhere(pattern, self._parameters)
        for name, now, first in zip(self._parameters, pattern, self._local_pattern, strict=True):
            if now != first:
                raise UserError(
                    f"parameter {name!r} {'has a' if now else 'has no'} gradient in this step, unlike in the first one; "
                    "the ranks agreed in the first step on which gradients they exchange. Use every parameter in every "
                    "step, or PyTorch's DistributedDataParallel with find_unused_parameters=True"
                )
        return [p for p, used in zip(self._parameters.values(), self._used, strict=True) if used]


def _used_anywhere(pattern: list[bool], parameters: dict[str, nn.Parameter]) -> list[bool]:
    if not pattern:
        return []
    device = next(iter(parameters.values())).device
    counts = torch.tensor(pattern, dtype=torch.int32, device=device)
    dist.all_reduce(counts)
    return (counts > 0).tolist()


@torch.no_grad()
def broadcast_from_rank0(tensors: list[Tensor]) -> None:
    """Overwrite each tensor with rank 0's; one message a tensor. Strides (channels_last) may be any."""
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, src=0)
        tensor.copy_(dense)
