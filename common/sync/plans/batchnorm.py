"""The plan of the messages that SyncBatchNorm adds to those of any strategy: two for each layer.

common/models/sync_batchnorm.py sends them, ``synchronised_layers`` in
common/training_engine/batchnorm.py finds the layers of a model. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from common.sync.message_cost import Operation
from common.sync.plans.base import ReplicatedPlan

_SUM_BYTES = 8  # forward's sums travel in float64


@dataclass(frozen=True)
class BatchNormLayer:
    """A BatchNorm layer that trains.

    parameters_before : how many of the model's trained parameters come before the layer's own.
    """

    channels: Annotated[int, Meta(ge=1, le=2**31)]
    parameters_before: Annotated[int, Meta(ge=0, le=100_000)]


@dataclass(kw_only=True)
class SyncBatchNormPlan(ReplicatedPlan):
    """An all_reduce for each layer in forward, and one in backward, in reverse order.

    The layer waits for each: computing goes on when the message has arrived. Forward's holds one
    count, C sums and C sums of squares for C channels; backward's holds two sums for each channel.

    Parameters
    ----------
    layers : in the order of forward. itemsize : bytes of a number in backward's message; 8 for a
        model in float64, 4 for all others.
    """

    layers: Sequence[BatchNormLayer] = ()
    itemsize: int = 4

    def forward(self, sizes: Sequence[int]) -> list[Operation]:
        """List the messages of forward; ``needed_bytes`` says when forward reaches the layer."""
        return [
            Operation(
                "all_reduce",
                _SUM_BYTES * (2 * layer.channels + 1),
                needed_bytes=sum(sizes[: layer.parameters_before]),
            )
            for layer in self.layers
        ]

    def backward(self, sizes: Sequence[int]) -> list[Operation]:
        """List the messages of backward. A rank's part of the sums is its own layer's gradient."""
        return [
            Operation(
                "all_reduce",
                self.itemsize * 2 * layer.channels,
                ready_bytes=sum(sizes[layer.parameters_before :]),
            )
            for layer in reversed(self.layers)
        ]

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """See the base class."""
        return self.forward(sizes) + self.backward(sizes)
