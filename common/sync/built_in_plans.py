"""What a step of ``fsdp`` and of ``ddp_zero1`` sends: PyTorch's own ways to shard a training.

Like message_plans.py, this file imports no torch.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from common.sync.bucket_plans import DDPPlan
from common.sync.message_cost import GradientSize, Operation, sent_bytes, tree_children, with_shape
from common.sync.message_plans import MessagePlan


class FSDPPlan(MessagePlan):
    """For each layer two all_gathers of weights, in forward and backward, and a reduce_scatter.

    Each parameter is padded to N equal parts of whole rows. The plan counts Gloo's messages: a
    reduce_scatter is an all_reduce there, and nothing overlaps with computing, so that it costs as
    much as if everything was sent after backward. On NCCL a reduce_scatter sends half.
    """

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class. Backward gathers a layer's weights before it reduces the last one."""
        gathers: list[Operation] = []
        reduces: list[Operation] = []
        for layer in layers_of(sizes) if ranks > 1 else []:
            part = sum(part_bytes(size, ranks) for size in layer)
            gathers.append(Operation("all_gather", part, copied_bytes=ranks * part))
            reduces.append(Operation("all_reduce", ranks * part, copied_bytes=ranks * part))
        backward = gathers[-1:]
        for index in reversed(range(len(gathers))):
            backward += [*gathers[max(0, index - 1) : index], reduces[index]]
        return gathers + backward

    def update_share(self, ranks: int) -> float:
        """See the base class."""
        return 1 / ranks


class DDPZero1Plan(DDPPlan):
    """As ``DDPPlan``, then a broadcast of each rank's share of the weights.

    A rank without a parameter broadcasts 4 bytes.
    """

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        shares, empty = self._broadcasts(sizes, ranks)
        found = [Operation("broadcast", share, needed_bytes=0) for share in shares]
        if empty:
            found.append(Operation("broadcast", 4, count=empty, needed_bytes=0))
        return super().operations(sizes, ranks) + found

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """See the base class. Each broadcast has another root, so each rank has all places once."""
        shares, empty = self._broadcasts(sizes, ranks)
        reductions = super().operations(sizes, ranks)
        children = [tree_children((rank - root) % ranks, ranks) for root in range(len(shares))]
        of_empty = 4 * (ranks - 1 - sum(children)) if empty else 0
        return (
            sum(
                (sent_bytes(o.kind, o.nbytes, rank=rank, ranks=ranks) for o in reductions),
                Fraction(),
            )
            + sum(share * count for share, count in zip(shares, children, strict=True))
            + of_empty
        )

    def _broadcasts(self, sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
        """Return the bytes of each share, in the order of the ranks, and how many have none."""
        shares = [sum(sizes[i] for i in share) for share in shares_of(sizes, ranks)]
        return shares, ranks - len(shares)

    def update_share(self, ranks: int) -> float:
        """See the base class."""
        return 1 / ranks


def layers_of(sizes: Sequence[int]) -> list[list[GradientSize]]:
    """Return the parameters of each layer: one with two or more dimensions begins a layer.

    So a BatchNorm, which has vectors only, travels with the convolution before it.
    """
    layers: list[list[GradientSize]] = []
    for size in map(with_shape, sizes):
        if len(size.shape) > 1 or not layers:
            layers.append([])
        layers[-1].append(size)
    return layers


def part_bytes(size: GradientSize, ranks: int) -> int:
    """Return the bytes of a rank's part of a parameter: 1/N of its rows, rounded up."""
    rows, *others = size.shape
    return -(-rows // ranks) * math.prod(others) * size.itemsize


def shares_of(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the parameters, as indices, of the first ranks; the others have none.

    The largest goes first, to the emptiest rank: so ZeroRedundancyOptimizer shares out the
    parameters of one group of its optimiser.
    """
    entries = [with_shape(size).entries for size in sizes]
    shares: list[list[int]] = [[] for _ in sizes[:ranks]]
    filled = [0] * len(shares)
    for index in sorted(range(len(sizes)), key=lambda i: -entries[i]):
        rank = filled.index(min(filled))
        shares[rank].append(index)
        filled[rank] += entries[index]
    return shares
