"""What a prediction is about: ``Scenario``, a calibrated training on nodes with some links.

``Scenario.network`` is what messages cost there, ``Scenario.compute_at`` what a rank computes.
Imports no torch.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from common.errors import UserError
from common.say import duration_text
from common.sync.plans.batchnorm import SyncBatchNormPlan
from lab.predict.calibrated_draws import drawn_network, drawn_remainder
from lab.predict.calibration_file import Calibration
from lab.predict.cluster import TypicalCluster, typical_latency, with_compression
from lab.predict.compute_model import (
    LEAST_SAMPLES,
    MOST_UPDATE,
    OPTIMIZERS,
    StepCompute,
    local_samples,
    times,
)
from lab.predict.event_model import HEADERS, Network, smaller, with_waits
from lab.predict.priors import Beliefs

# Between two ranks of a node, where it was not measured: GPUs on PCIe; NVLink is faster.
TYPICAL_INSIDE_BITS = 100e9
MOST_RANKS_PER_NODE = 1024
_SHORTEST_NODE_STEP = 0.9  # over the step of a rank alone: measurements scatter


def compute_of(
    calibration: Calibration,
    ranks: int,
    *,
    batch_size: int,
    scaling: str,
    own_machines: bool,
    ranks_per_node: int = 1,
    least_samples: int = LEAST_SAMPLES,
    accumulation_steps: int = 1,
) -> StepCompute:
    """Return the step of one of ``ranks`` ranks.

    own_machines : each node, with ``ranks_per_node`` ranks, is a machine of its own; else the ranks
        are placed as in the calibration.
    least_samples : that a rank's step has. accumulation_steps : micro-batches of a step.
    """
    if own_machines:
        ranks_here = min(ranks, ranks_per_node)
    elif calibration.over_loopback:
        ranks_here = ranks
    else:
        ranks_here = min(ranks, max(ranks_per_node, calibration.ranks_here))
    samples = local_samples(batch_size, ranks, scaling=scaling, least=least_samples)
    micro_batch = math.ceil(samples / accumulation_steps)
    compute = calibration.compute.at(micro_batch, ranks_here=ranks_here)
    return replace(compute, passes=accumulation_steps)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A calibrated training on nodes, whose number is still open.

    Parameters
    ----------
    batch_size, scaling : samples of a step of all ranks together ("strong"), or of each rank
        ("weak").
    rate_bits, latency_seconds : of a node's link, and of a message over it; None: as calibrated.
        Without both the ranks are placed as in the calibration: if it measured over loopback, they
        share one machine.
    ranks_per_node : ranks that share a node's link.
    inside_bits : bits per second between two ranks of a node; None: as calibrated over loopback,
        else ``TYPICAL_INSIDE_BITS``.
    own_nodes : the step's time is that of the reader's own ranks, each with its own processor.
    accumulation_steps : micro-batches of a step, whose gradients add up before the exchange.
    gradient_type : of the calibration's gradients, as shown to a reader; None: not shown.
    sync_batchnorm : BatchNorm layers normalise over all ranks, and wait for the messages.
    cluster : what the nodes' software and links cost; None: as calibrated.
    step_seconds, step_samples : the reader's own step of one rank alone, of one micro-batch, if
        there is one.
    node_step_seconds : the same step on a node where all of its ranks compute; messages inside the
        node are part of it.
    update_bytes : that the optimiser reads and writes for each parameter.
    in_draws : network and compute hold arrays, an entry for each draw of what is uncertain.

    Raises UserError if the values contradict each other or the calibration.
    """

    calibration: Calibration
    batch_size: int
    scaling: str
    rate_bits: float | None = None
    latency_seconds: float | None = None
    ranks_per_node: int = 1
    inside_bits: float | None = None
    own_nodes: bool = False
    step_samples: float | None = None
    accumulation_steps: int = 1
    gradient_type: str | None = None
    sync_batchnorm: bool = False
    cluster: TypicalCluster | None = None
    step_seconds: float | None = None
    node_step_seconds: float | None = None
    update_bytes: float = OPTIMIZERS["momentum"]
    in_draws: bool = False

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise UserError(f"--accumulation-steps: got {self.accumulation_steps}, give 1 or more")
        if self.batch_size < self.least_samples:
            wanted = f"{self.least_samples} or more"
            if self.accumulation_steps > 1:
                wanted += f", for {self.accumulation_steps} micro-batches"
            raise UserError(f"--batch-size: got {self.batch_size}, give {wanted}")
        if not 1 <= self.ranks_per_node <= MOST_RANKS_PER_NODE:
            raise UserError(
                f"--ranks-per-node: got {self.ranks_per_node}, give 1 to {MOST_RANKS_PER_NODE:,}"
            )
        if self.ranks_per_node > 1 and self.on_one_machine:
            raise UserError(
                f"--ranks-per-node {self.ranks_per_node}: without --rate all ranks share one "
                "machine, as in the calibration. Add --rate, that of the nodes' links"
            )
        if self.node_step_seconds is not None:
            self._check_node_step(self.node_step_seconds)
        if self.inside_bits is not None and self.ranks_per_node == 1:
            raise UserError(
                "--rate-inside: each node has one rank, so nothing is sent inside a node. Add "
                "--ranks-per-node"
            )
        if self.sync_batchnorm and self.calibration.batchnorm is None:
            raise UserError(
                f"--sync-batchnorm on: the BatchNorm layers of {self.calibration.model} are not "
                "known: run lab calibrate again, or give --model in place of --parameters"
            )

    def _check_node_step(self, node_step_seconds: float) -> None:
        if self.step_seconds is None:
            raise UserError("--node-step-time: add --step-time, that of one rank alone")
        if self.ranks_per_node == 1:
            raise UserError(
                "--node-step-time: each node has one rank, so it is --step-time. Add "
                "--ranks-per-node, or leave it out"
            )
        if node_step_seconds < _SHORTEST_NODE_STEP * self.step_seconds:
            raise UserError(
                f"--node-step-time: a step of a node takes {duration_text(node_step_seconds)}, "
                f"less than one of a rank alone, {duration_text(self.step_seconds)}: give both "
                "for the same batch of a rank"
            )

    @property
    def least_samples(self) -> int:
        """The fewest samples of a rank's step: BatchNorm needs two in each micro-batch.

        One is enough where the reader's own step had one.
        """
        least = LEAST_SAMPLES if self.calibration.trains_batchnorm else 1
        return self.accumulation_steps * math.ceil(min(least, self.step_samples or least))

    @property
    def plan_options(self) -> dict[str, Any]:
        """What the software decides of what strategies send: NCCL fetches weights ahead."""
        return {"fetches_ahead": self.cluster is not None and self.cluster.backend == "nccl"}

    @property
    def own_machines(self) -> bool:
        """Whether each node is a machine of its own, with the links of this scenario."""
        if self.cluster is not None:
            return True
        return self.rate_bits is not None or self.latency_seconds is not None

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks share one machine."""
        return not self.own_machines and self.calibration.over_loopback

    @property
    def inside_measured(self) -> bool:
        """Whether the calibration knows what messages inside a node cost."""
        return self.calibration.over_loopback and not self.own_nodes

    @property
    def software_bits(self) -> float:
        """The bits a second that a node's software passes at most."""
        if self.cluster is not None:
            return float(self.cluster.most_bits)
        return self.calibration.network.software_bits

    @property
    def enough_bits(self) -> float:
        """The rate above which a link changes nothing, since the software passes no more."""
        if self.cluster is not None:
            return self.software_bits / float(self.cluster.values.line_share)
        return self.software_bits

    def drawn(self) -> "Scenario":
        """Return the scenario with draws of what is uncertain in place of typical values."""
        if self.cluster is not None:
            return replace(self, cluster=self.cluster.drawn(), in_draws=True)
        return replace(self, in_draws=True)

    def with_beliefs(self, beliefs: Beliefs) -> "Scenario":
        """Return the scenario on a cluster of which so much is known."""
        assert self.cluster is not None
        return replace(self, cluster=self.cluster.with_beliefs(beliefs))

    @property
    def remainder(self) -> Any:
        """Draws of measured over predicted step where all numbers of the prediction are right."""
        if self.cluster is not None:
            return self.cluster.values.unexplained
        return drawn_remainder()

    @cached_property
    def network(self) -> Network:
        """What messages cost."""
        return self._network(faster=1)

    @cached_property
    def faster_network(self) -> Network:
        """The same with twice the bytes a second on the nodes' links."""
        return self._network(faster=2)

    def _network(self, *, faster: int) -> Network:
        rate_bits = None if self.rate_bits is None else faster * self.rate_bits
        if self.cluster is not None:
            return self._cluster_network(self.cluster, rate_bits, faster)
        measured = self.calibration.network
        if self.in_draws:
            measured = drawn_network(self.calibration)
        measured = with_compression(measured, in_draws=self.in_draws)
        within = self._inside(measured)
        if rate_bits is None:
            measured = measured.faster(faster)
        return measured.over(
            rate_bits=rate_bits,
            latency_seconds=self.latency_seconds,
            ranks_per_node=self.ranks_per_node,
            inside=within,
        )

    def _cluster_network(
        self, cluster: TypicalCluster, rate_bits: float | None, faster: int
    ) -> Network:
        if rate_bits is None:
            cluster = cluster.faster(faster)
        inside = Network(0.0, 0.0)  # in the node's step
        if self.node_step_seconds is None:
            inside = cluster.inside(self.inside_bits)
        latency = self.latency_seconds
        if latency is None:
            latency = cluster.latency(self.rate_bits)
        return cluster.network(
            rate_bits=rate_bits,
            latency_seconds=latency,
            ranks_per_node=self.ranks_per_node,
            inside=inside,
        )

    def _inside(self, measured: Network) -> Network:
        """Return what messages inside a node cost: no more latency than over its link."""
        if self.inside_measured:
            inside = measured.over(rate_bits=self.inside_bits, latency_seconds=None)
        else:
            rate_bits = self.inside_bits or TYPICAL_INSIDE_BITS
            inside = replace(
                measured,
                alpha_seconds=typical_latency(rate_bits),
                beta_seconds_per_byte=8 * HEADERS / rate_bits,
                kinds={},
            )
        if self.latency_seconds is None:
            return inside
        return inside.with_latency_up_to(self.latency_seconds)

    def compute_at(self, nodes: int, *, network: Network | None = None) -> StepCompute:
        """Return the step of a rank on that number of nodes.

        network : of the messages for which its layers wait; None: that of the scenario.
        """
        ranks = nodes * self.ranks_per_node
        compute = compute_of(
            self.calibration,
            ranks,
            batch_size=self.batch_size,
            scaling=self.scaling,
            own_machines=self.own_machines,
            ranks_per_node=1 if self.own_nodes else self.ranks_per_node,
            least_samples=self.least_samples,
            accumulation_steps=self.accumulation_steps,
        )
        # The calibration's own optimiser is SGD with momentum.
        as_calibrated = self.update_bytes / OPTIMIZERS["momentum"]
        compute = replace(compute, update_seconds=as_calibrated * compute.update_seconds)
        if self.cluster is not None:
            alone = self._own_step(self.cluster, ranks, compute)
            slowest = times(alone, self.cluster.values.straggling(nodes))
            compute = replace(slowest, alone=alone)
        if not self.sync_batchnorm:
            return compute
        return with_waits(
            compute,
            SyncBatchNormPlan(layers=self.calibration.batchnorm or ()),
            self.calibration.gradient_sizes,
            ranks,
            network=network or self.network,
        )

    def _own_step(self, cluster: TypicalCluster, ranks: int, compute: StepCompute) -> StepCompute:
        """Return the reader's own step at the samples of a rank, divided as the calibrated one.

        The update does not: it takes as long as its bytes.
        """
        if self.step_seconds is None or self.step_samples is None:
            return compute
        step_seconds: Any = self.step_seconds
        if self.node_step_seconds is not None:
            step_seconds = self.node_step_seconds
            compute = replace(compute, update_ranks=self.ranks_per_node)
        elif self.ranks_per_node > 1:
            step_seconds = step_seconds * (1 + cluster.values.node_loss)
        update = self.update_seconds(cluster)
        samples = self._micro_batch(ranks)
        share = cluster.values.batch_share(samples / self.step_samples)
        factor = (
            (step_seconds - update) * share / (compute.before_seconds + compute.backward_seconds)
        )
        return replace(times(compute, factor), update_seconds=update)

    def update_seconds(self, cluster: TypicalCluster) -> Any:
        """Return how long the optimiser takes for its bytes, a part of the reader's own step."""
        assert self.step_seconds is not None
        entries = sum(size.entries for size in self.calibration.gradient_sizes)
        by_bytes = self.update_bytes * entries * cluster.values.update_seconds
        return smaller(by_bytes, MOST_UPDATE * self.step_seconds)

    def _micro_batch(self, ranks: int) -> int:
        """Return the samples of a rank's pass."""
        least = self.least_samples
        samples = local_samples(self.batch_size, ranks, scaling=self.scaling, least=least)
        return math.ceil(samples / self.accumulation_steps)
