"""Buckets by hand: each is sent as soon as backward has made its gradients, while it still computes the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError
from common.sync.base import GradientSync
from common.sync.bucket_plans import OverlappedPlan
from common.sync.bucketing import assign_buckets
from common.sync.flat_buffer import FlatBuffer
from common.sync.message_cost import GradientSize


class Overlapped(OverlappedPlan, GradientSync):
    """A hook on each parameter copies its gradient into a bucket (``p.grad`` becomes a view of it, none is copied back);
    a full one goes into an asynchronous ``all_reduce``, in the same order on every rank; ``synchronize`` waits for them.

    With N ranks and M bytes of gradients in K buckets (for VGG-11 three: 9.5, 27.2 and 0.3 MB), per step, as a ring:
    every rank sends 2(N-1)K messages, 2(N-1)/N M bytes, and receives as many.
    Time: that of the last bucket, plus what backward was too short to hide of the others:
    c_k = max(r_k, c_{k-1}) + 2(N-1) alpha + 2(N-1)/N M_k / B, where r_k is when bucket k is ready and c_K the end.
    The first step, in which the ranks agree on their gradients, sends the same buckets after backward.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1 in the first, then 25, as DistributedDataParallel has it.
    """

    def __init__(self, *, bucket_mb: float | None = None) -> None:
        super().__init__(bucket_mb=bucket_mb)
        self._holding = False
        self._hooks: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._buckets: list[_Bucket] = []  # none until the ranks have agreed
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._works: list[dist.Work] = []

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self.close()
        super().prepare(model, optimizer)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._gradient_ready)
            for p in self._parameters.values()
        ]
        return model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See the base class; the hooks do nothing meanwhile."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None or self._holding:
            return
        if parameter not in bucket.missing:
            raise UserError(
                "a parameter got a second gradient in one step, after the first one may have been sent: put "
                "backward passes that do not end a step inside the strategy's no_sync()"
            )
        bucket.take(parameter)
        if not bucket.missing:
            self._send(lambda next_one: not next_one.missing)

    def _send(self, may_go: "Callable[[_Bucket], bool]") -> None:
        """Start the exchange of the next buckets, as long as they may go: never one before its turn."""
        while len(self._works) < len(self._buckets) and may_go(self._buckets[len(self._works)]):
            self._works.append(
                dist.all_reduce(self._buckets[len(self._works)].close(), async_op=True)
            )

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        parameters = self.exchanged()
        if not self._buckets:
            in_ready_order = parameters[::-1]
            self._buckets = [
                _Bucket([in_ready_order[i] for i in share])
                for share in assign_buckets(GradientSize.of(in_ready_order), self.bucket_mb)
            ]
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.used}
        self._send(lambda _: True)
        for bucket, work in zip(self._buckets, self._works, strict=True):
            work.wait()
            bucket.open()
        self._works = []

    def close(self) -> None:
        """See the base class."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()


class _Bucket:
    """A flat buffer, and which of the gradients that this rank computes are still ``missing`` in it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buffer = FlatBuffer(parameters)
        self._ranks = dist.get_world_size()
        self.used = {p for p in parameters if p.grad is not None}
        self._unused = [p for p in parameters if p.grad is None]
        self.missing = set(self.used)

    def take(self, parameter: nn.Parameter) -> None:
        """Copy one gradient in."""
        self._buffer.take(parameter, divisor=self._ranks)
        self.missing.remove(parameter)

    def close(self) -> Tensor:
        """Return the buffer to be summed: with zeros for what other ranks alone compute, and with what no hook brought."""
        for parameter in self._unused:
            self._buffer.views[parameter].zero_()
        for parameter in list(self.missing):
            self.take(parameter)
        return self._buffer.tensor

    def open(self) -> None:
        """After the exchange: give this rank the gradients that others alone computed, and begin anew."""
        for parameter in self._unused:
            parameter.grad = self._buffer.views[parameter]
        self.missing = set(self.used)
