"""The base class of strategies: a default for each method, and which gradients are exchanged.

Order of the calls: ``prepare`` once; in every step ``synchronize`` after the last backward and
``after_step`` after the optimiser's step; ``sync_replicas`` before evaluation and before a
checkpoint; ``close`` at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from common.errors import UserError
from common.sync.plans.base import MessagePlan

if TYPE_CHECKING:
    from common.sync.backward_buckets import BackwardBuckets
    from common.sync.flat_buffer import FlatBuffer
    from common.sync.optimizer_shards import OptimizerShards, Segment


class GradientSync:
    """Base class of all strategies; most of them override only ``synchronize``.

    After ``synchronize`` every rank's ``p.grad`` is the plain mean of the ranks' gradients, with
    the same bits on all ranks: add in the same order everywhere. The engine weights each rank's
    loss, so this mean is the gradient of the mean loss over the whole global batch.

    Parameters
    ----------
    plan : what a step sends, with the strategy's options (plans/base.py); ``build_sync`` gives
        the one that is listed with the strategy. None: the plan of the class.
    """

    # What a step sends; a strategy of your own that has this one cannot be predicted.
    plan: MessagePlan = MessagePlan()

    # False if lossy or periodic; such a strategy's docstring says what it keeps instead.
    exact = True

    # Whether all ranks have the same gradients after ``synchronize``, and so agree on overflow.
    equal_gradients = True

    # Whether messages go on between two steps, so that others have to wait for them.
    weights_under_way = False

    # Encloses each wait outside ``synchronize`` and ``after_step``; the engine times it as "sync".
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    # Encloses what the strategy sends in threads of its own; the engine's timeline records it.
    recording: Callable[[], AbstractContextManager[object]] = nullcontext

    # What a strategy may attach to the model and the optimiser; ``close`` removes it. With
    # ``_shards`` each rank's optimiser updates a part, and is whole only after ``sync_replicas``.
    _hooks: Sequence[RemovableHandle] = ()
    _filling: "BackwardBuckets | None" = None
    _shards: "OptimizerShards | None" = None

    # Which parameters had a gradient in the first step.
    _first_pattern: Sequence[bool] | None = None
    _exchanged: Sequence[nn.Parameter] = ()
    _not_on_all_ranks: Sequence[nn.Parameter] = ()  # of these, some rank has no gradient
    _buffers: "Sequence[FlatBuffer]" = ()

    def __init__(self, plan: MessagePlan | None = None) -> None:
        self.plan = plan or self.plan

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Copy rank 0's parameters and buffers to every rank; return the module to train with.

        Called before the first step; harmless when called again.
        """
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._first_pattern = None
        self._buffers = ()
        self._filling = None
        broadcast_from_rank0([*model.parameters(), *model.buffers()])
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for forward and backward of all micro-batches but a step's last."""
        return nullcontext() if self._filling is None else self._filling.paused()

    def synchronize(self, model: nn.Module) -> None:
        """Replace every gradient by its mean over the ranks.

        Called after the last backward, before unscale, clip and step.
        """

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, shape (), the same on every rank; for clipping.

        ``gradients`` : those of the parameters that this rank's optimiser updates. Collective if
        they are only a part.
        """
        norm = get_total_norm(gradients)
        return norm if self._shards is None else self._shards.norm_over_ranks(norm)

    def segment_of(self, parameter: nn.Parameter) -> "Segment | None":
        """Return this rank's part of a parameter, if its optimiser updates no more than that."""
        return None if self._shards is None else self._shards.segment_of(parameter)

    def after_step(self, model: nn.Module) -> None:
        """Exchange weights here if the strategy does so; called after the optimiser."""

    def wait_for_weights(self) -> None:
        """Wait for weights that are under way; called before the engine reads weights itself."""

    def sync_replicas(self, model: nn.Module) -> None:
        """Make weights and optimiser state equal on all ranks. A collective call.

        Called before evaluation or a checkpoint. Does nothing if ``synchronize`` suffices.
        """
        self.wait_for_weights()
        if self._shards is not None:
            self._shards.gather()

    def close(self) -> None:
        """Remove what ``prepare`` attached to the model and the optimiser.

        Optimiser state that ``sync_replicas`` has not gathered is lost.
        """
        for hook in self._hooks:
            hook.remove()
        if self._shards is not None:
            self._shards.close()
        self._hooks = ()
        self._shards = None

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs for an exact resume, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of ``exchanged``; zeros for a gradient that this rank lacks."""
        gradients = []
        for parameter in self.exchanged():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def contiguous_gradients(self) -> Iterator[Tensor]:
        """Yield each of ``gradients`` as a contiguous tensor to be averaged in place.

        Collectives need contiguous memory, and channels_last gradients are not contiguous. For
        these it yields a copy, and copies the mean back before it yields the next gradient.
        """
        for gradient in self.gradients():
            dense = gradient.contiguous()  # itself, if it is contiguous
            yield dense
            gradient.copy_(dense)

    def flat_gradients(self, *, divisor: int | None = None) -> list[Tensor]:
        """Return this rank's gradients / N in flat tensors, one for each dtype.

        Each ``p.grad`` becomes a view of them (flat_buffer.py): leave the sum over the ranks there.
        ``divisor`` : replaces N, the number of ranks.
        """
        from common.sync.flat_buffer import FlatBuffer, by_type  # most strategies need none

        parameters = self.exchanged()
        self._buffers = self._buffers or [FlatBuffer(alike) for alike in by_type(parameters)]
        for buffer in self._buffers:
            for parameter in buffer.parameters:
                buffer.take(parameter, divisor=divisor or dist.get_world_size())
        return [buffer.tensor for buffer in self._buffers]

    def exchanged(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients are exchanged: the same list on every rank.

        A tied parameter is listed once. A gradient that is None on some ranks counts as zero there.
        One that is None on all ranks stays None, so the optimiser skips it as it would in one
        process. The ranks agree on this in the first step.

        Raises UserError naming the parameter if a later step has other gradients than the first.
        """
        parameters = list(self._parameters.values())
        pattern = [p.grad is not None for p in parameters]
        if self._first_pattern is None:
            self._first_pattern = pattern
            device = next((p.device for p in parameters), None)
            users = torch.tensor(pattern, dtype=torch.int32, device=device)  # ranks that have it
            dist.all_reduce(users)
            counted = list(zip(parameters, users.tolist(), strict=True))
            self._exchanged = [p for p, n in counted if n]
            self._not_on_all_ranks = [p for p, n in counted if 0 < n < dist.get_world_size()]
        for name, now, first in zip(self._parameters, pattern, self._first_pattern, strict=True):
            if now != first:
                changed = (
                    "has no gradient in this step, but had one in the first step"
                    if first
                    else "has a gradient in this step, but had none in the first step"
                )
                raise UserError(
                    f"parameter {name!r} {changed}, in which the ranks agreed on the gradients "
                    "that they exchange. Use every parameter in every step, or PyTorch's "
                    "DistributedDataParallel with find_unused_parameters=True"
                )
        return self._exchanged


class FlatSync(GradientSync):
    """Base class of the strategies that sum all gradients in one flat buffer for each dtype."""

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for total in self.flat_gradients():  # (entries,), divided by N already
            self.sum_over_ranks(total)

    def sum_over_ranks(self, total: Tensor) -> None:
        """Sum ``total`` over the ranks in place; it is contiguous, and of any length."""


@torch.no_grad()
def broadcast_from_rank0(tensors: list[Tensor]) -> None:
    """Overwrite each tensor, whatever its strides, with rank 0's: one broadcast per tensor."""
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, src=0)
        tensor.copy_(dense)


def check_strategy(sync: GradientSync, *, scales: bool, use_ema: bool) -> None:
    """Raise UserError if the strategy does not go with loss scaling, or with averaged weights."""
    if scales and not sync.exact:
        raise UserError(
            f"{type(sync).__name__} does not keep every step's exact gradient, but fp16's loss "
            "scaling needs it: give --amp-dtype bf16 (torch.bfloat16), or an exact strategy"
        )
    if use_ema and sync.plan.period > 1:
        raise UserError(
            f"{type(sync).__name__} lets the ranks' weights differ between averages, so each rank "
            "would keep a different moving average: leave out --ema, or choose another strategy"
        )
