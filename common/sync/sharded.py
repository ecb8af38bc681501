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
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.distributed.collectives import reduce_scatter_single
from common.sync.backward_buckets import BackwardBuckets
from common.sync.base import GradientSync
from common.sync.bucketing import buckets_in_ready_order
from common.sync.flat_buffer import FlatBuffer
from common.sync.optimizer_shards import FlatWeights, OptimizerShards, Segment
from common.sync.plans.sharded import ShardedPlan
from common.sync.ring import ring_reduce_scatter
from common.utils.processes import DaemonThreads


class Sharded(GradientSync):
    """Hooks that send gradients during backward and wait for weights during forward.

    Raises UserError in ``prepare`` unless the optimiser treats each entry by itself.
    """

    plan: ShardedPlan
    equal_gradients = False
    weights_under_way = True
    _buckets: "Sequence[_Bucket]" = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class."""
        self.sync_replicas(model)
        self.close()
        self._shards = OptimizerShards(optimizer)
        called: set[nn.Module] = set()
        self._called = called
        self._hooks = [
            # Functions, not methods: a deep copy of the model then does not copy the strategy.
            module.register_forward_pre_hook(lambda module, _inputs: called.add(module))
            for module in model.modules()
        ]
        return super().prepare(model, optimizer)

    def synchronize(self, model: nn.Module) -> None:
        """Give this rank's segments their mean gradients; ``p.grad`` becomes None."""
        parameters = self.exchanged()
        self.wait_for_weights()
        if self._filling is None:
            self._filling = self._make_buckets(parameters, model)
        assert self._shards is not None, "prepare comes first"
        segments: dict[nn.Parameter, Segment] = {}
        for bucket in self._buckets:
            segments |= bucket.weights.segments
        self._shards.shard(segments)
        self._filling.finish()
        for bucket in self._buckets:
            bucket.finish_reduce()
        for parameter in parameters:
            parameter.grad = None

    def after_step(self, model: nn.Module) -> None:
        """Start to gather the new weights, in the order in which forward needs them."""
        for bucket in reversed(self._buckets):
            bucket.gathering = bucket.weights.start_gather()

    def wait_for_weights(self) -> None:
        """See the base class."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def _make_buckets(
        self, parameters: Sequence[nn.Parameter], model: nn.Module
    ) -> BackwardBuckets:
        shares = buckets_in_ready_order(parameters, self.plan.bucket_mb)
        self._buckets = [_Bucket(share, number) for number, share in enumerate(shares)]
        self._threads = None if dist.get_backend() == dist.Backend.NCCL else DaemonThreads(2)
        for hook in self._hooks:
            hook.remove()
        buffers = [bucket.gradients for bucket in self._buckets]
        filling = BackwardBuckets(buffers, self._send, self._not_on_all_ranks)
        self._hooks = [
            *filling.hooks,
            model.register_state_dict_pre_hook(lambda *_: self.wait_for_weights()),
            *(
                module.register_forward_pre_hook(self._waits_for(needed))
                for module, needed in self._needed_by_module(model).items()
            ),
        ]
        return filling

    def _send(self, index: int) -> None:
        for bucket in self._buckets[:index]:
            if bucket.is_reduced():
                bucket.finish_reduce()  # early, since it frees memory
        self._buckets[index].start_reduce(self._threads, self.recording)

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
                if bucket.gathering is not None:
                    with self.waiting():
                        bucket.finish_gather()

        return wait

    def close(self) -> None:
        """See the base class."""
        self.wait_for_weights()
        super().close()
        self._filling = None
        self._buckets = ()
        self._threads = None


class _Bucket:
    """Some parameters' gradients and weights in flat memory; one of N parts is this rank's.

    ``gathering`` : the message by which other ranks' weights arrive; None: all weights are there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], number: int) -> None:
        self.parameters = parameters
        self._number = number
        self.gradients = FlatBuffer(parameters, multiple_of=dist.get_world_size())
        self.weights = FlatWeights(parameters)
        self._mean = torch.empty_like(self.weights.own)  # (length,) this rank's part
        self._wait_for_mean: Callable[[], object] | None = None
        self.gathering: dist.Work | None = None

    def start_reduce(
        self,
        threads: DaemonThreads | None,
        recording: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Send every other rank its part of this rank's gradients.

        threads : run a ring of messages, within ``recording()``; None: ``reduce_scatter`` does it.
        """

        def ring() -> None:
            parts = self.gradients.tensor.tensor_split(dist.get_world_size())
            with recording():
                ring_reduce_scatter(parts, tag=self._number)
                # Inside: the recorder takes this for the end of the last message.
                self._mean.copy_(parts[dist.get_rank()])

        nan = self.gradients.tensor.new_full((), torch.nan)
        for parameter in self.parameters:
            parameter.grad = nan.expand_as(parameter)  # not yet known
        if threads is None:
            work: Any = reduce_scatter_single(self._mean, self.gradients.tensor, async_op=True)
            self.is_reduced = work.is_completed
            self._wait_for_mean = work.wait
        else:
            future = threads.submit(ring)
            self.is_reduced = future.done
            self._wait_for_mean = future.result

    def finish_reduce(self) -> None:
        """Wait for the other ranks' gradients, give the segments the mean, and free the rest.

        Each share is divided by N already. Does nothing if it is done already.
        """
        if self._wait_for_mean is None:
            return
        self._wait_for_mean()
        self._wait_for_mean = None
        own = [segment.parameter for segment in self.weights.segments.values()]
        lengths = [len(parameter) for parameter in own]
        for parameter, mean in zip(own, self._mean[: sum(lengths)].split(lengths), strict=True):
            parameter.grad = mean if len(mean) else None
        self.gradients.free()

    def finish_gather(self) -> None:
        """Wait until all weights are there."""
        if self.gathering is not None:
            self.gathering.wait()
        self.gathering = None
