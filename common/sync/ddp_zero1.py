"""DistributedDataParallel, and an optimiser of which each rank has one part: ZeRO's first stage.

    backward   ####################################
    bucket 1            ========                      all_reduce, as in ddp.py
    bucket 2                        ==============
    update                                            #      1/N of it
    all-gather                                          ===  of the new weights

The weights are flat, in N parts of equal length, and part r belongs to rank r. Every rank gets the
whole mean gradient, as in ddp.py, but its optimiser updates and remembers its part only
(optimizer_shards.py). Then every rank sends its new weights to all others. sharded.py sends half as
much for the gradients, and hides the weights behind the next forward pass.

Equal to ``ddp``, with these differences: gradients are gone after the step; and the optimiser's
    state is spread over the ranks until ``sync_replicas`` gathers it.
Sends: every rank, rank 0 included, 2(N-1)/N M bytes for the gradients, as ddp.py, and (N-1)/N M for
    the weights in N-1 messages; it receives as much. Padding adds up to N-1 entries.
Time: as ddp.py, and (N-1) alpha + (N-1)/N M / B, which nothing hides.
    [Rajbhandari et al., ZeRO, arXiv:1910.02054, stage 1]
Common mistake: ``state_dict`` of each rank's own part in a checkpoint: then nobody else's is saved.
    Another: a norm for clipping that counts one rank's part only.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link.) Each dtype
has its own flat weights.
"""

from torch import nn
from torch.optim import Optimizer

from common.sync.ddp import DDPWrapper
from common.sync.flat_buffer import by_type
from common.sync.optimizer_shards import FlatWeights, OptimizerShards, Segment


class DDPZero1(DDPWrapper):
    """As ``ddp``, but each rank's optimiser updates its part of the weights.

    Raises UserError in ``prepare`` unless the optimiser treats each entry by itself.
    """

    equal_gradients = False  # the optimiser's own: each rank has those of its part

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class. Every parameter becomes a view of flat weights."""
        self.sync_replicas(model)
        self.close()
        self._shards = OptimizerShards(optimizer)
        self._weights = [FlatWeights(alike) for alike in by_type(model.parameters())]
        self._segments: dict[nn.Parameter, Segment] = {}
        for weights in self._weights:
            self._segments |= weights.segments
        return super().prepare(model, optimizer)

    def synchronize(self, model: nn.Module) -> None:
        """Pass this rank's part of the mean gradients, which DDP's hooks have sent, on."""
        assert self._shards is not None, "prepare comes first"
        self._shards.shard(self._segments)
        for parameter, segment in self._segments.items():
            if len(segment.parameter) and parameter.grad is not None:
                in_memory = parameter.grad.as_strided((parameter.numel(),), (1,))
                segment.parameter.grad = in_memory[segment.part]

    def after_step(self, model: nn.Module) -> None:
        """Gather the new weights, and drop the gradients."""
        for weights in self._weights:
            weights.start_gather().wait()
        for parameter, segment in self._segments.items():
            parameter.grad = None
            segment.parameter.grad = None
