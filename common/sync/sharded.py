"""Each rank updates its part of the parameters, and communication hides behind both passes.

    forward    ......####################                     a layer waits for its own bucket only
    backward                             ####################
    all-gather ==3== ==2== ==1==                              new weights, in the order of forward
    reduce                                   ==1== ==2== ==3= gradients, in the order of backward
    update     #                                             # 1/N of it

Buckets are flat, as those of ``overlapped``, and cut into N parts of equal length; part r belongs
to rank r. A full bucket leaves during backward. NCCL uses ``reduce_scatter``. Gloo's is a whole
all_reduce, so there the first half of ring.py's ring runs, two buckets at a time in two threads.
The optimiser then holds this rank's parts only (optimizer_shards.py), with 1/N of the state. After
its step the new weights leave by ``all_gather``, and the next forward pass waits before each layer
for the buckets that the layer needs. So half of what ``overlapped`` sends during and after backward
can hide behind forward.

Equal to the other exact strategies, with these differences: ``p.grad`` is None after
    ``synchronize``, since no rank has the whole mean gradient; the norm for clipping is added up
    over the ranks; and weights may be under way until ``sync_replicas``, which also gathers the
    optimiser's state. After a step a layer's weights may be incomplete until its next forward
    begins; then they are whole until the next step. Call ``sync_replicas`` before you read them.
Sends: every rank, rank 0 included, 2(N-1)/N M bytes in K buckets, and receives as much; padding
    adds up to N-1 entries a bucket. On Gloo 2(N-1)K messages.
Time: as ``overlapped``, with (N-1)/N M_k bytes for bucket k in backward; the same again in forward,
    where bucket k is there at d_k = d_(k+1) + t_k, and its first layer starts no sooner. Each rank
    adds (N-1)/N M bytes up in memory, and copies M bytes into the buckets, on Gloo M/N out of them.
    [Rajbhandari et al., ZeRO, arXiv:1910.02054, stage 2; Zhang et al., DeAR, arXiv:2302.12445]
Memory of a rank: M of weights, 1/N of mean gradients and of the optimiser's state; and every
    bucket from its first gradient until it is reduced: up to M if the link is slow. On Gloo also
    receive buffers: 1/N of two buckets (docs/memory.md).
Common mistake: reading weights, e.g. for a moving average, that are still under way. Another:
    clipping by the norm of one rank's part.

(N ranks, M bytes of gradients.) Each dtype has its own buckets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from common.distributed.collectives import all_gather_single, reduce_scatter_single
from common.sync.backward_buckets import BackwardBuckets
from common.sync.base import GradientSync, norm_over_ranks
from common.sync.bucket_plans import ShardedPlan
from common.sync.bucketing import buckets_in_ready_order
from common.sync.flat_buffer import FlatBuffer
from common.sync.optimizer_shards import OptimizerShards, Segment
from common.sync.ring import ring_reduce_scatter
from common.utils.processes import DaemonThreads


class Sharded(ShardedPlan, GradientSync):
    """Hooks that send gradients during backward and wait for weights during forward.

    Parameters
    ----------
    bucket_mb : MiB that close a bucket; None: 1.

    Raises UserError in ``prepare`` unless the optimiser treats each entry by itself.
    """

    equal_gradients = False
    weights_under_way = True
    _optimizer: OptimizerShards | None = None
    _filling: BackwardBuckets | None = None
    _buckets: "Sequence[_Bucket]" = ()
    _threads: DaemonThreads | None = None
    _hooks: Sequence[RemovableHandle] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        if self._optimizer is not None:
            self.sync_replicas(model)
        self.close()
        self._optimizer = OptimizerShards(optimizer)
        called: set[nn.Module] = set()
        self._called = called
        self._hooks = [
            # Functions, not methods: a deep copy of the model then does not copy the strategy.
            module.register_forward_pre_hook(lambda module, _inputs: called.add(module))
            for module in model.modules()
        ]
        return super().prepare(model, optimizer)

    def no_sync(self) -> AbstractContextManager[None]:
        """See the base class; the hooks of backward do nothing meanwhile."""
        return self._filling.paused() if self._filling else nullcontext()

    def synchronize(self, model: nn.Module) -> None:
        """Give this rank's segments their mean gradients; ``p.grad`` becomes None."""
        parameters = self.exchanged()
        self.wait_for_weights()
        if self._filling is None:
            self._make_buckets(parameters, model)
        assert self._filling is not None
        assert self._optimizer is not None
        self._optimizer.shard(
            {p: bucket.segments.get(p) for bucket in self._buckets for p in bucket.parameters}
        )
        self._filling.finish()
        for bucket in self._buckets:
            bucket.finish_reduce()
        for parameter in parameters:
            parameter.grad = None

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """See the base class."""
        return norm_over_ranks(gradients, device=next(iter(self._parameters.values())).device)

    def after_step(self, model: nn.Module) -> None:
        """Start to gather the new weights, in the order in which forward needs them."""
        for bucket in reversed(self._buckets):
            bucket.start_gather()

    def wait_for_weights(self) -> None:
        """See the base class."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def sync_replicas(self, model: nn.Module) -> None:
        """See the base class. The next ``synchronize`` shards the optimiser again."""
        self.wait_for_weights()
        if self._optimizer is not None:
            self._optimizer.gather()

    def close(self) -> None:
        """Remove the hooks. Optimiser state that ``sync_replicas`` has not gathered is lost."""
        self.wait_for_weights()
        if self._filling is not None:
            self._filling.close()
        if self._optimizer is not None:
            self._optimizer.close()
        for hook in self._hooks:
            hook.remove()
        self._filling, self._optimizer, self._hooks, self._buckets = None, None, (), ()
        self._threads = None

    def _make_buckets(self, parameters: Sequence[nn.Parameter], model: nn.Module) -> None:
        shares = buckets_in_ready_order(parameters, self.bucket_mb)
        self._buckets = [_Bucket(share, number) for number, share in enumerate(shares)]
        if dist.get_backend() != dist.Backend.NCCL:
            self._threads = DaemonThreads(2)
        self._filling = BackwardBuckets([one.gradients for one in self._buckets], self._send)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            model.register_state_dict_pre_hook(lambda *_: self.wait_for_weights()),
            *(
                module.register_forward_pre_hook(self._waits_for(needed))
                for module, needed in self._needed_by_module(model).items()
            ),
        ]

    def _send(self, index: int) -> None:
        for bucket in self._buckets[:index]:
            if bucket.is_reduced():
                bucket.finish_reduce()  # early, since it frees memory
        if self._threads is None:
            self._buckets[index].start_reduce()
        else:
            self._buckets[index].start_ring(self._threads, self.recording)

    def _needed_by_module(self, model: nn.Module) -> dict[nn.Module, "list[_Bucket]"]:
        """Return the buckets that each module's forward needs.

        A module that is not called, since another module uses its parameters directly (as
        ``nn.MultiheadAttention`` does), cannot wait for itself: the whole model waits for it.
        """
        needed: dict[nn.Module, list[_Bucket]] = {}
        for module in model.modules():
            own = set(module.parameters(recurse=False))
            waiting = needed.setdefault(module if module in self._called else model, [])
            waiting += [
                bucket
                for bucket in reversed(self._buckets)
                if bucket not in waiting and not own.isdisjoint(bucket.parameters)
            ]
        return {module: buckets for module, buckets in needed.items() if buckets}

    def _waits_for(self, needed: "Sequence[_Bucket]") -> Callable[..., None]:
        def wait(*_: object) -> None:
            for bucket in needed:
                if bucket.under_way:
                    with self.waiting():
                        bucket.finish_gather()

        return wait


class _Bucket:
    """Some parameters' gradients and weights in flat memory; one of N parts is this rank's."""

    def __init__(self, parameters: Sequence[nn.Parameter], number: int) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        self.parameters, self._number = parameters, number
        self.gradients = FlatBuffer(parameters, multiple_of=size)
        self._weights = FlatBuffer(parameters, multiple_of=size)
        with torch.no_grad():
            for parameter, view in self._weights.views.items():
                parameter.data = view.copy_(parameter)
        length = len(self._weights.tensor) // size
        self._own_weights = self._weights.tensor[rank * length :][:length]
        self._mean = torch.empty_like(self._own_weights)  # (length,) this rank's part
        self.segments: dict[nn.Parameter, Segment] = {}
        self._mean_gradients: list[tuple[nn.Parameter, Tensor]] = []  # of each segment
        end = -rank * length  # of the last parameter, counted from the begin of this rank's part
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            inside = slice(max(begin, 0), min(end, length))
            if inside.start < inside.stop:
                segment = nn.Parameter(self._own_weights[inside])
                part = slice(inside.start - begin, inside.stop - begin)
                self.segments[parameter] = Segment(segment, part)
                self._mean_gradients.append((segment, self._mean[inside]))
        self.is_reduced: Callable[[], bool] = lambda: False
        self._wait_for_mean: Callable[[], object] | None = None
        self._gathering: dist.Work | None = None

    def start_reduce(self) -> None:
        """Send every other rank its part of this rank's gradients."""
        self._hide_gradients()
        work: Any = reduce_scatter_single(self._mean, self.gradients.tensor, async_op=True)
        self.is_reduced, self._wait_for_mean = work.is_completed, work.wait

    def start_ring(
        self, threads: DaemonThreads, recording: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """As ``start_reduce``, by a ring of messages in one of ``threads``."""

        def reduce() -> None:
            parts = self.gradients.tensor.tensor_split(dist.get_world_size())
            with recording():
                ring_reduce_scatter(parts, tag=self._number)
                # Inside: the recorder takes this for the end of the last message.
                self._mean.copy_(parts[dist.get_rank()])

        self._hide_gradients()
        future = threads.submit(reduce)
        self.is_reduced, self._wait_for_mean = future.done, future.result

    def _hide_gradients(self) -> None:
        nan = self.gradients.tensor.new_full((), torch.nan)
        for parameter in self.parameters:
            parameter.grad = nan.expand_as(parameter)  # not yet known

    def finish_reduce(self) -> None:
        """Wait for the other ranks' gradients, give the segments the mean, and free the rest.

        Each share is divided by N already. Does nothing if it is done already.
        """
        if self._wait_for_mean is None:
            return
        self._wait_for_mean()
        for segment, mean in self._mean_gradients:
            segment.grad = mean
        self.is_reduced, self._wait_for_mean = (lambda: True), None
        self.gradients.free()

    def start_gather(self) -> None:
        """Send this rank's new weights to all others."""
        self._gathering = all_gather_single(self._weights.tensor, self._own_weights, async_op=True)

    def finish_gather(self) -> None:
        """Wait until all weights are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def under_way(self) -> bool:
        """Whether other ranks' weights may still be missing."""
        return self._gathering is not None
