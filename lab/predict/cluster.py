"""Clusters that nobody calibrated: which software sends over which links, and what that costs.

``TypicalCluster.network`` makes the event model's network from priors (priors.toml). Imports no
torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from lab.predict.event_model import Network, NodeLinks, Rate, smaller
from lab.predict.priors import Beliefs, ClusterValues, load_priors

LATENCIES = ((1e9, 200e-6), (10e9, 50e-6), (math.inf, 20e-6))
_COMMON_BITS = 10e9  # of a link whose rate is not known
RDMA_LATENCY = 5e-6  # seconds of a message on InfiniBand or RoCE, switches included
_ROOTED = ("gather", "scatter")
_KINDS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "exchange")


def typical_latency(rate_bits: float) -> float:
    """Return the seconds that a message takes on a link of that rate in one room, by TCP.

    Orders of magnitude: measure your own with `lab calibrate` on the nodes.
    """
    return next(seconds for most, seconds in LATENCIES if rate_bits <= most)


@dataclass(frozen=True)
class TypicalCluster:
    """A kind of cluster, and what is known of its costs.

    values : of the typical cluster, or of each of some draws. software_bits : what its software
    passes, where the reader knows that.

    Raises UserError if no such cluster exists.
    """

    backend: str
    transport: str
    beliefs: Beliefs
    values: ClusterValues
    software_bits: float | None = None

    @classmethod
    def of(cls, backend: str, transport: str, beliefs: Beliefs | None = None) -> "TypicalCluster":
        """Return the typical cluster; ``beliefs`` are those of priors.toml, or of a fit."""
        if (backend, transport) == ("gloo", "rdma"):
            raise UserError(
                "--backend gloo --transport rdma: Gloo sends by TCP. Give --transport tcp, or "
                "--backend nccl"
            )
        if beliefs is None:
            beliefs = Beliefs.of(load_priors())
        return cls(backend, transport, beliefs, beliefs.typical(backend, transport))

    @property
    def name(self) -> str:
        """The software and the links, for a reader: "NCCL over TCP"."""
        backend = {"gloo": "Gloo", "nccl": "NCCL"}[self.backend]
        return f"{backend} over {self.transport.upper()}"

    def with_beliefs(self, beliefs: Beliefs) -> "TypicalCluster":
        """Return the typical cluster of which so much is known."""
        values = beliefs.typical(self.backend, self.transport)
        return replace(self, beliefs=beliefs, values=values)

    def drawn(self) -> "TypicalCluster":
        """Return draws of such clusters."""
        return replace(self, values=self.beliefs.drawn(self.backend, self.transport))

    @property
    def most_bits(self) -> Any:
        """The bits a second that a node's software passes at most."""
        return self.values.most_bits if self.software_bits is None else self.software_bits

    def faster(self, factor: int) -> "TypicalCluster":
        """Return the cluster whose software passes ``factor`` times the bits a second."""
        return replace(self, software_bits=factor * self.most_bits)

    def latency(self, rate_bits: float | None) -> float:
        """Return the typical latency of a message on a link of that rate; None: not known."""
        if self.transport == "rdma":
            return RDMA_LATENCY
        return typical_latency(_COMMON_BITS if rate_bits is None else rate_bits)

    def payload_bits(self, rate_bits: float | None) -> Any:
        """Return the payload bits a second that a node's link of that rate passes.

        None : the rate is not known, so the software alone limits it.
        """
        if rate_bits is None:
            return self.most_bits
        return smaller(self.values.line_share * rate_bits, self.most_bits)

    def network(
        self,
        *,
        rate_bits: float | None,
        latency_seconds: float,
        ranks_per_node: int,
        inside: Network,
    ) -> Network:
        """Return what messages cost: between nodes, and ``inside`` one.

        rate_bits : nominal rate of a node's link. latency_seconds : of a message on it, without
        what the software adds.
        """
        values = self.values
        beta = 8 / self.payload_bits(rate_bits)
        alpha = latency_seconds + values.message_seconds
        rate = Rate(alpha, beta, start_seconds=values.call_seconds)
        by_root = Rate(alpha, beta, start_seconds=values.root_call_seconds)
        return NodeLinks(
            alpha,
            beta,
            values.sum_seconds,
            kinds=dict.fromkeys(_KINDS, rate) | dict.fromkeys(_ROOTED, by_root),
            overlap_cost=values.overlap_cost,
            shared_by=ranks_per_node,
            within=inside,
        )

    def inside(self, inside_bits: float | None) -> Network:
        """Return what messages between two ranks of a node cost, with the software's latency."""
        bits = self.values.inside_bits if inside_bits is None else inside_bits
        return Network(self.values.message_seconds, 8 / bits)
