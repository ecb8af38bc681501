"""Files of measured multi-node steps, and each row as a ``MeasuredStep``. Imports no torch.

published.csv, which comes with the project, holds measurements that others published. Its columns
are those of ``PublishedStep``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.predict.calibration_file import Calibration, load_calibration, reference_path
from lab.predict.cluster import TypicalCluster
from lab.predict.common_models import TENSORS, evenly, model_called
from lab.predict.compute_model import LEAST_SAMPLES, OPTIMIZERS
from lab.predict.event_model import LARGEST_NODES
from lab.predict.fitting import MeasuredStep
from lab.predict.own_model import with_own_step
from lab.predict.priors import Beliefs
from lab.predict.scenario import MOST_RANKS_PER_NODE, Scenario
from lab.predict.step_tables import StepRow, read_rows
from lab.predict.tables import message_plans

_RDMA = re.compile(r"\b(rdma|infiniband|ib|roce(v[12])?|efa)\b", re.IGNORECASE)
_TCP = re.compile(r"\b(tcp|ipoib)\b", re.IGNORECASE)
_TEXTS = ("group", "model", "transport", "software")
_COUNTS = {"nodes": LARGEST_NODES, "ranks_per_node": MOST_RANKS_PER_NODE}
_NUMBERS = (
    "grad_megabytes",
    "batch_per_rank",
    "measured_step_s",
)
_OF_ONE_RANK = ("one_rank_batch", "one_rank_step_s")  # or the step of a node
_PERHAPS = ("rate_gbit", "one_node_step_s")  # numbers that were not always published


@dataclass(frozen=True)
class PublishedStep:
    """A row: one measured step, and what was published about the cluster.

    columns : all of the row's columns as they stand in the file. rate_gbit : nominal, of a node's
    link; None: not stated. one_rank_step_s : of one rank alone, with ``one_rank_batch`` samples.
    one_node_step_s : of one node with all its ranks, with ``batch_per_rank`` samples each. Where a
    row has this one alone, it is ``one_rank_step_s``, too.
    """

    columns: Mapping[str, str]
    group: str
    model: str
    grad_megabytes: float
    ranks_per_node: int
    nodes: int
    rate_gbit: float | None
    transport: str
    software: str
    strategy: str
    batch_per_rank: float
    one_rank_batch: float
    one_rank_step_s: float
    one_node_step_s: float | None
    measured_step_s: float

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def backend(self) -> str:
        """Gloo, if the software says so, or runs on CPUs; else NCCL."""
        software = self.software.lower()
        on_cpus = "cpu" in software and "nccl" not in software
        return "gloo" if on_cpus or "gloo" in software else "nccl"

    @property
    def by_rdma(self) -> bool:
        """Whether messages go by InfiniBand, RoCE or the like, and not by TCP over such links."""
        if self.backend == "gloo" or _TCP.search(self.transport):
            return False
        return _RDMA.search(self.transport) is not None

    @property
    def setting(self) -> tuple[object, ...]:
        """All that rows have in common which differ in the strategy alone."""
        return (
            *(self.group, self.model, self.software, self.transport, self.rate_gbit),
            *(self.grad_megabytes, self.batch_per_rank, self.nodes, self.ranks_per_node),
        )

    @property
    def own_seconds(self) -> float:
        """The step of one rank at this row's batch, if it takes half as long for half as many."""
        return self.one_rank_step_s * self.batch_per_rank / self.one_rank_batch

    def cell(self, beliefs: Beliefs) -> MeasuredStep:
        """Return the row as a step to predict."""
        # Batches are whole numbers, but a mean of 21.3 of 64 samples is 21 of 63.
        samples = max(LEAST_SAMPLES, round(self.batch_per_rank))
        step_samples = samples * self.one_rank_batch / self.batch_per_rank
        step_seconds = self.one_rank_step_s
        node_step = None
        if self.ranks_per_node > 1 and self.one_node_step_s is not None:
            step_samples = samples
            step_seconds = self.own_seconds
            # A node's step that is shorter than that of one rank was measured by somebody else.
            node_step = max(self.one_node_step_s, step_seconds)
        own = with_own_step(_reference(), step_seconds, step_samples)
        nbytes = 1e6 * self.grad_megabytes
        model = model_called(self.model, nbytes) or evenly(nbytes / 4, TENSORS)
        rate_bits = None if self.rate_gbit is None else 1e9 * self.rate_gbit
        transport = "rdma" if self.by_rdma else "tcp"
        scenario = Scenario(
            calibration=model.of(own, nbytes),
            batch_size=samples,
            scaling="weak",
            rate_bits=rate_bits,
            ranks_per_node=self.ranks_per_node,
            own_nodes=True,
            cluster=TypicalCluster.of(self.backend, transport, beliefs, rate_bits=rate_bits),
            step_seconds=step_seconds,
            step_samples=step_samples,
            node_step_seconds=node_step,
            # For each entry of the gradients, which may have 2 bytes.
            update_bytes=OPTIMIZERS[model.optimizer] * 4 * model.parameters / nbytes,
        )
        plan = message_plans([self.strategy], scenario.plan_options)[self.strategy]
        return MeasuredStep(scenario, plan, self.nodes, self.measured_step_s)


@cache
def _reference() -> Calibration:
    return load_calibration(reference_path())


def published_path() -> Path:
    """Return the measurements that come with the project."""
    return Path(__file__).with_name("published.csv")


def read_published(path: Path) -> list[PublishedStep]:
    """Return the rows of a file of measurements. Lines that begin with # do not count.

    Raises UserError if the file is none, or if a value cannot be, with its row.
    """
    needed = ("strategy", *_TEXTS, *_COUNTS, *_NUMBERS, *_OF_ONE_RANK, *_PERHAPS)
    return [_of_row(row) for row in read_rows(path, needed)]


def _of_row(row: StepRow) -> PublishedStep:
    values: dict[str, Any] = {"strategy": row.strategy()}
    for name in _TEXTS:
        values[name] = row.text(name)
    for name, most in _COUNTS.items():
        values[name] = row.whole(name, most=most)
    for name in _NUMBERS:
        values[name] = row.number(name)
    for name in _PERHAPS:
        values[name] = row.number(name) if row.text(name) else None
    if row.text("one_rank_step_s") or values["one_node_step_s"] is None:
        values["one_rank_step_s"] = row.number("one_rank_step_s")
        values["one_rank_batch"] = row.number("one_rank_batch")
    else:  # the step of a whole node stands for that of a rank: the node's loss is in it
        values["one_rank_step_s"] = values["one_node_step_s"]
        values["one_rank_batch"] = values["batch_per_rank"]
    return PublishedStep(columns=row.columns, **values)
