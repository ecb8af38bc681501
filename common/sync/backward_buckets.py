"""Flat buckets that fill while backward runs; each is sent as soon as it is full."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.sync.flat_buffer import FlatBuffer


class BackwardBuckets:
    """Hooks that copy each gradient, divided by the number of ranks, into its bucket.

    Call ``finish`` after backward, and remove ``hooks`` at the end. The step in which the object
    is made has run backward already: ``finish`` then fills and sends all buckets.

    Parameters
    ----------
    buckets : in the order in which they are sent, on every rank the same. A full bucket waits for
        those before it.
    send : called once a step with the index of each full bucket.
    late : parameters without a gradient on some rank, which fills their buckets only in ``finish``.
        So do all: they would wait for that rank anyway, and NCCL needs one order of the messages
        of all groups, such as SyncBatchNorm's, on every rank.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBuffer],
        send: Callable[[int], None],
        late: Collection[nn.Parameter],
    ) -> None:
        self._buckets = buckets
        self._send = send
        self._late = set(late)
        self._accumulating = False
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            for bucket in buckets
            for parameter in bucket.parameters
        ]
        self._begin_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients accumulate, and fill no bucket."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def finish(self) -> None:
        """Copy the gradients that no hook has copied, and send the buckets that are left.

        These are all gradients in the first step, later those of ``late``; zeros where this rank
        has none.
        """
        for parameter, bucket in self._missing.items():
            bucket.take(parameter, divisor=dist.get_world_size())
        self._missing.clear()
        self._send_full()
        self._begin_step()

    def _begin_step(self) -> None:
        self._sent = 0
        self._missing = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        if self._accumulating or parameter in self._late:
            return
        bucket = self._missing.pop(parameter, None)
        if bucket is None:
            raise UserError(
                "a parameter got a second gradient in one step, after the first one may have been "
                "sent: put backward passes that do not end a step inside the strategy's no_sync()"
            )
        bucket.take(parameter, divisor=dist.get_world_size())
        self._send_full()

    def _send_full(self) -> None:
        for bucket in self._buckets[self._sent :]:
            if not self._missing.keys().isdisjoint(bucket.parameters):
                break
            self._send(self._sent)
            self._sent += 1
