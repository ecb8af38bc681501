"""Clusters that nobody calibrated: which software sends over which links, and what that costs.

``TypicalCluster.network`` makes the event model's network from priors (priors.toml). Imports no
torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.errors import UserError
from lab.predict.event_model import Network, NodeLinks, Rate, smaller
from lab.predict.priors import Beliefs, ClusterValues, load_priors

LATENCIES = ((1e9, 200e-6), (10e9, 50e-6), (math.inf, 20e-6))
_COMMON_BITS = 10e9  # of a link whose rate is not known
RDMA_LATENCY = 5e-6  # seconds of a message on InfiniBand or RoCE, switches included
BITS_OF_ADAPTER = 100e9  # of a node without GPUDirect that has several adapters

# Each kind of transport by the generation of its nodes, and the rate of a node's link from which on
# the later generation is the likelier one. Gloo and NCCL reach it at different rates by TCP.
GENERATIONS = {
    "tcp": ("tcp-vm", "tcp-server"),
    "rdma": ("rdma-host", "rdma-gpudirect"),
}
LATER_FROM_BITS = {("gloo", "tcp"): 25e9, ("nccl", "tcp"): 100e9, ("nccl", "rdma"): 200e9}
TRANSPORT_NAMES = {
    "tcp-vm": "TCP on virtual machines",
    "tcp-server": "TCP on servers",
    "rdma-host": "RDMA through the host's memory",
    "rdma-gpudirect": "RDMA with GPUDirect",
}
_ROOTED = ("gather", "scatter")
_KINDS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "exchange")


def typical_latency(rate_bits: float) -> float:
    """Return the seconds that a message takes on a link of that rate in one room, by TCP.

    Orders of magnitude: measure your own with `lab calibrate` on the nodes.
    """
    return next(seconds for most, seconds in LATENCIES if rate_bits <= most)


def with_compression(network: Network, *, in_draws: bool = False) -> Network:
    """Return a measured network with what CPUs that run Gloo take to compress.

    No calibration measures that. in_draws : for each draw, in place of the typical value.
    """
    if network.compress_seconds:
        return network
    typical = TypicalCluster.of("gloo", "tcp")
    values = typical.drawn().values if in_draws else typical.values
    return replace(network, compress_seconds=values.compress_seconds)


def generation_of(backend: str, transport: str, rate_bits: float | None) -> str:
    """Return the transport with the likelier generation of nodes on links of that rate.

    transport : one of ``GENERATIONS``, or what that has; rate_bits None: not known.
    """
    if transport not in GENERATIONS:
        return transport
    earlier, later = GENERATIONS[transport]
    if (rate_bits or 0) < LATER_FROM_BITS.get((backend, transport), math.inf):
        return earlier
    return later


@dataclass(frozen=True)
class TypicalCluster:
    """A kind of cluster, and what is known of its costs.

    transport : with its generation, one of ``GENERATIONS``' values. values : of the typical
    cluster, or of each of some draws. software_bits : what its software passes, where the reader
    knows that. adapters : network adapters of a node.

    Raises UserError if no such cluster exists.
    """

    backend: str
    transport: str
    beliefs: Beliefs
    values: ClusterValues
    software_bits: float | None = None
    adapters: int = 1

    @classmethod
    def of(
        cls,
        backend: str,
        transport: str,
        beliefs: Beliefs | None = None,
        *,
        rate_bits: float | None = None,
        adapters: int | None = None,
    ) -> "TypicalCluster":
        """Return the typical cluster.

        transport, rate_bits : see ``generation_of``. beliefs : those of priors.toml, or of a fit.
        adapters : of a node; None: one, or one for 100 Gbit/s through the host's memory.
        """
        if backend == "gloo" and transport.startswith("rdma"):
            raise UserError(
                f"--backend gloo --transport {transport}: Gloo sends by TCP. Give --transport tcp, "
                "or --backend nccl"
            )
        transport = generation_of(backend, transport, rate_bits)
        if adapters is None:
            adapters = 1
            if transport == "rdma-host" and rate_bits is not None:
                adapters = max(1, round(rate_bits / BITS_OF_ADAPTER))
        if beliefs is None:
            beliefs = Beliefs.of(load_priors())
        values = beliefs.typical(backend, transport)
        return cls(backend, transport, beliefs, values, adapters=adapters)

    @property
    def name(self) -> str:
        """The software and the links, for a reader: "NCCL over RDMA with GPUDirect"."""
        backend = {"gloo": "Gloo", "nccl": "NCCL"}[self.backend]
        return f"{backend} over {TRANSPORT_NAMES[self.transport]}"

    def with_beliefs(self, beliefs: Beliefs) -> "TypicalCluster":
        """Return the typical cluster of which so much is known."""
        values = beliefs.typical(self.backend, self.transport)
        return replace(self, beliefs=beliefs, values=values)

    def drawn(self) -> "TypicalCluster":
        """Return draws of such clusters."""
        return replace(self, values=self.beliefs.drawn(self.backend, self.transport))

    @property
    def most_bits(self) -> Any:
        """The bits a second that a node's software passes at most; infinite: as many as come."""
        if self.software_bits is not None:
            return self.software_bits
        return self.adapters * self.values.most_bits

    @property
    def passes_all(self) -> bool:
        """Whether the software passes all that the links bring."""
        return bool(np.all(np.isinf(self.most_bits)))

    def faster(self, factor: int) -> "TypicalCluster":
        """Return the cluster whose software passes ``factor`` times the bits a second."""
        return replace(self, software_bits=factor * self.most_bits)

    def latency(self, rate_bits: float | None) -> float:
        """Return the typical latency of a message on a link of that rate; None: not known."""
        if self.transport.startswith("rdma"):
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
            tree_share=values.tree_share,
            compress_seconds=values.compress_seconds,
            shared_by=ranks_per_node,
            within=inside,
        )

    def inside(self, inside_bits: float | None) -> Network:
        """Return what messages between two ranks of a node cost."""
        bits = self.values.inside_bits if inside_bits is None else inside_bits
        return Network(self.values.inside_seconds, 8 / bits)
