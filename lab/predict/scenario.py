"""What a prediction is about: ``Scenario``, a calibrated training on nodes with some links.

``Scenario.network`` is what messages cost there, ``Scenario.compute_at`` what a rank computes.
Imports no torch.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from common.errors import UserError
from common.sync.plans.batchnorm import SyncBatchNormPlan
from lab.predict.calibration_file import Calibration
from lab.predict.compute_model import LEAST_SAMPLES, StepCompute, local_samples
from lab.predict.event_model import HEADERS, Network, with_waits

_LATENCIES = ((1e9, 200e-6), (10e9, 50e-6), (math.inf, 20e-6))
# Between two ranks of a node, where it was not measured: GPUs on PCIe; NVLink is faster.
TYPICAL_INSIDE_BITS = 100e9
_MOST_RANKS_PER_NODE = 1024


def typical_latency(rate_bits: float) -> float:
    """Return the seconds that a message takes on a link of that rate in one room, by TCP.

    Orders of magnitude: measure your own with `lab calibrate` on the nodes.
    """
    return next(seconds for most, seconds in _LATENCIES if rate_bits <= most)


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
    step_samples : of that step, which has one micro-batch; None: unknown.
    accumulation_steps : micro-batches of a step, whose gradients add up before the exchange.
    gradient_type : of the calibration's gradients, as shown to a reader; None: not shown.
    sync_batchnorm : BatchNorm layers normalise over all ranks, and wait for the messages.

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
    step_samples: int | None = None
    accumulation_steps: int = 1
    gradient_type: str | None = None
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise UserError(f"--accumulation-steps: got {self.accumulation_steps}, give 1 or more")
        if self.batch_size < self.least_samples:
            wanted = f"{self.least_samples} or more"
            if self.accumulation_steps > 1:
                wanted += f", for {self.accumulation_steps} micro-batches"
            raise UserError(f"--batch-size: got {self.batch_size}, give {wanted}")
        if not 1 <= self.ranks_per_node <= _MOST_RANKS_PER_NODE:
            raise UserError(
                f"--ranks-per-node: got {self.ranks_per_node}, give 1 to {_MOST_RANKS_PER_NODE:,}"
            )
        if self.ranks_per_node > 1 and self.on_one_machine:
            raise UserError(
                f"--ranks-per-node {self.ranks_per_node}: without --rate all ranks share one "
                "machine, as in the calibration. Add --rate, that of the nodes' links"
            )
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

    @property
    def least_samples(self) -> int:
        """The fewest samples of a rank's step: BatchNorm needs two in each micro-batch.

        One is enough where the reader's own step had one.
        """
        least = LEAST_SAMPLES if self.calibration.trains_batchnorm else 1
        return self.accumulation_steps * min(least, self.step_samples or least)

    @property
    def own_machines(self) -> bool:
        """Whether each node is a machine of its own, with the links of this scenario."""
        return self.rate_bits is not None or self.latency_seconds is not None

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks share one machine."""
        return not self.own_machines and self.calibration.over_loopback

    @property
    def inside_measured(self) -> bool:
        """Whether the calibration knows what messages inside a node cost."""
        return self.calibration.over_loopback and not self.own_nodes

    @cached_property
    def network(self) -> Network:
        """What messages cost."""
        return self._over(self.calibration.network, self.rate_bits)

    @cached_property
    def faster_network(self) -> Network:
        """The same with twice the bytes a second on the nodes' links."""
        measured = self.calibration.network
        if self.rate_bits is None:
            return self._over(measured.faster(2), None)
        return self._over(measured, 2 * self.rate_bits)

    def _over(self, measured: Network, rate_bits: float | None) -> Network:
        return measured.over(
            rate_bits=rate_bits,
            latency_seconds=self.latency_seconds,
            ranks_per_node=self.ranks_per_node,
            inside=self._inside(),
        )

    def _inside(self) -> Network:
        """Return what messages inside a node cost: no more latency than over its link."""
        measured = self.calibration.network
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
        if not self.sync_batchnorm:
            return compute
        return with_waits(
            compute,
            SyncBatchNormPlan(layers=self.calibration.batchnorm or ()),
            self.calibration.gradient_sizes,
            ranks,
            network=network or self.network,
        )
