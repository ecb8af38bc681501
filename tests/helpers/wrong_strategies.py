"""Wrong gradient synchronisation, from published solutions or possible in this project.

Each class is right except for what its docstring says. ``wrong.py`` lists the classes with the test
that catches each one.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.sync.base import GradientSync
from common.sync.halving_doubling import HalvingDoubling
from common.sync.hierarchical import Hierarchical
from common.sync.overlapped import Overlapped
from common.sync.ring import Ring
from common.sync.tree import Tree


class Mean(GradientSync):
    """A right all-reduce, which the other classes change."""

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for gradient in self.gradients():
            self.average(gradient)

    def average(self, gradient: Tensor) -> None:
        """Replace one gradient with its mean over the ranks."""
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


class Sum(Mean):
    """The gradients are added up, but never divided by the number of ranks."""

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class LiteralDivisor(Mean):
    """The sum is divided by a literal 2, which is right on two ranks only."""

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= 2


class OwnGradient(Mean):
    """Nothing is exchanged: each rank steps with its own gradient."""

    def average(self, gradient: Tensor) -> None:
        pass


class FirstParameterLeftOut(Mean):
    """The first parameter's gradient is not exchanged."""

    def synchronize(self, model: nn.Module) -> None:
        for gradient in self.gradients()[1:]:
            self.average(gradient)


class StaleByOneStep(Mean):
    """Each step uses the mean gradient of the step before."""

    def synchronize(self, model: nn.Module) -> None:
        gradients = self.gradients()
        for gradient in gradients:
            self.average(gradient)
        now = [gradient.clone() for gradient in gradients]
        for gradient, before in zip(gradients, getattr(self, "_before", now), strict=True):
            gradient.copy_(before)
        self._before = now


class AveragedTwice(Mean):
    """The mean is divided by the number of ranks once more."""

    def average(self, gradient: Tensor) -> None:
        super().average(gradient)
        gradient /= dist.get_world_size()


class WeightsInsteadOfGradients(GradientSync):
    """Weights are averaged after each step; each rank keeps its own gradients and so momentum."""

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())


class BroadcastFromEachRank(Mean):
    """Each rank broadcasts its gradient in turn, so that all end with the last rank's."""

    def average(self, gradient: Tensor) -> None:
        for rank in range(dist.get_world_size()):
            dist.broadcast(gradient, src=rank)


class NoInitialBroadcast(Mean):
    """Each rank keeps its own initial weights."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return model


class FlatBufferNotCopiedBack(GradientSync):
    """A flat buffer is averaged, but ``p.grad`` is still this rank's own."""

    def synchronize(self, model: nn.Module) -> None:
        parameters = self.exchanged()
        own = [None if p.grad is None else p.grad.clone() for p in parameters]
        for total in self.flat_gradients():
            dist.all_reduce(total)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


class RingWithoutAChunk(Ring):
    """The ring's second half ends one round early: on each rank one chunk is not the sum."""

    def sum_over_ranks(self, total: Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        before = total.clone()
        super().sum_over_ranks(total)
        total.tensor_split(size)[rank].copy_(before.tensor_split(size)[rank])


class HalvingDoublingForPowersOfTwo(HalvingDoubling):
    """Ranks beyond the largest power of two receive the mean, but their gradients are not added."""

    def sum_over_ranks(self, total: Tensor) -> None:
        size = dist.get_world_size()
        if dist.get_rank() >= 1 << (size.bit_length() - 1):
            total.zero_()
        super().sum_over_ranks(total)


class TreeWithOneChild(Tree):
    """Rank 0 adds only its first child's gradient: that of rank 2 is left out."""

    def sum_over_ranks(self, total: Tensor) -> None:
        if dist.get_rank() == 2:
            total.zero_()
        super().sum_over_ranks(total)


class LastBucketNotSent(Overlapped):
    """The last bucket is filled during backward, but never sent."""

    def _send(self, index: int) -> None:
        if index < len(self._buffers) - 1:
            super()._send(index)


class NodeMeanDividedAgain(Hierarchical):
    """The mean inside each node is divided by the number of all ranks once more."""

    def sum_over_ranks(self, total: Tensor) -> None:
        total /= len(own_node(self))
        super().sum_over_ranks(total)


class MeanInsideNodesOnly(Hierarchical):
    """Each node takes the mean of its own ranks, and the nodes exchange nothing."""

    def sum_over_ranks(self, total: Tensor) -> None:
        total *= dist.get_world_size() / len(own_node(self))
        self._between = None
        super().sum_over_ranks(total)


class NodeMeansUnweighted(Hierarchical):
    """The mean of the nodes' means, as if every node had the same number of ranks."""

    def sum_over_ranks(self, total: Tensor) -> None:
        total *= dist.get_world_size() / len(self._nodes) / len(own_node(self))
        super().sum_over_ranks(total)


class LeaderKeepsTheSum(Hierarchical):
    """The leaders do not pass the sum on inside their nodes."""

    def sum_over_ranks(self, total: Tensor) -> None:
        own = total.clone()
        super().sum_over_ranks(total)
        if dist.get_rank() != self._leader:
            total.copy_(own)


def own_node(sync: Hierarchical) -> Sequence[int]:
    """Return the ranks that share this rank's node."""
    return next(ranks for ranks in sync._nodes if dist.get_rank() in ranks)
