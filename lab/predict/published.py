"""Files of measured multi-node steps, and each row as a ``Cell``. Imports no torch.

published.csv, which comes with the project, holds measurements that others published. Its columns
are those of ``PublishedStep``.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import UserError, file_errors
from common.sync import STRATEGIES
from common.sync.plans.base import MessagePlan
from common.utils.registry import choices_text
from lab.predict.calibration_file import Calibration, load_calibration, reference_path
from lab.predict.cluster import Cluster
from lab.predict.common_models import evenly, model_called
from lab.predict.fitting import Cell
from lab.predict.own_model import with_own_step
from lab.predict.priors import Beliefs
from lab.predict.scenario import Scenario
from lab.predict.tables import message_plans

_TENSORS = 50  # of a model that nobody knows
_RDMA = ("rdma", "infiniband", "roce", "efa")
_NUMBERS = {
    "grad_megabytes": "MB of gradients",
    "ranks_per_node": "ranks on each node",
    "nodes": "nodes",
    "batch_per_rank": "samples of a rank",
    "one_rank_batch": "samples of the step of one rank",
    "one_rank_step_s": "seconds of the step of one rank",
    "measured_step_s": "seconds of the measured step",
}
_PERHAPS = {"rate_gbit": "Gbit/s", "one_node_step_s": "seconds of the step of one node"}
_TEXTS = ("group", "model", "transport", "software", "strategy")


@dataclass(frozen=True)
class PublishedStep:
    """A row: one measured step, and what was published about the cluster.

    columns : all of the row's columns as they stand in the file. rate_gbit : nominal, of a node's
    link; None: not stated. one_rank_step_s : of one rank alone, with ``one_rank_batch`` samples.
    one_node_step_s : of one node with all its ranks, with ``batch_per_rank`` samples each.
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
        """Gloo, if the software says so, or else NCCL."""
        return "gloo" if "gloo" in self.software.lower() else "nccl"

    @property
    def by_rdma(self) -> bool:
        """Whether messages go by InfiniBand, RoCE or the like."""
        return any(name in self.transport.lower() for name in _RDMA)

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

    def cell(self, beliefs: Beliefs) -> Cell:
        """Return the row as a step to predict."""
        cluster = Cluster.of(self.backend, "rdma" if self.by_rdma else "tcp", beliefs)
        node_step = None
        if self.ranks_per_node > 1 and self.one_node_step_s is not None:
            # A node's step that is shorter than that of one rank was measured by somebody else.
            node_step = max(self.one_node_step_s, self.own_seconds)
            node_step *= self.one_rank_batch / self.batch_per_rank
        scenario = Scenario(
            calibration=self._calibration(),
            batch_size=round(self.batch_per_rank),
            scaling="weak",
            rate_bits=None if self.rate_gbit is None else 1e9 * self.rate_gbit,
            ranks_per_node=self.ranks_per_node,
            own_nodes=True,
            step_samples=round(self.one_rank_batch),
            cluster=cluster,
            step_seconds=self.one_rank_step_s,
            node_step_seconds=node_step,
        )
        return Cell(scenario, _plan(self.strategy), self.nodes, self.measured_step_s)

    def _calibration(self) -> Calibration:
        """Return a calibration with the row's model; its network is not used."""
        nbytes = 1e6 * self.grad_megabytes
        model = model_called(self.model, nbytes) or evenly(nbytes / 4, _TENSORS)
        own = with_own_step(_reference(), self.one_rank_step_s, self.one_rank_batch)
        return model.of(own, nbytes)


@cache
def _reference() -> Calibration:
    return load_calibration(reference_path())


@cache
def _plan(strategy: str) -> MessagePlan:
    return message_plans([strategy])[strategy]


def published_path() -> Path:
    """Return the measurements that come with the project."""
    return Path(__file__).with_name("published.csv")


def read_published(path: Path) -> list[PublishedStep]:
    """Return the rows of a file of measurements.

    Raises UserError if a column is missing, or a value cannot be, with its line.
    """
    with file_errors(f"--validate: {path} cannot be read", ": give a file of measurements"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    names = reader.fieldnames or ()
    missing = [name for name in (*_TEXTS, *_NUMBERS, *_PERHAPS) if name not in names]
    if missing:
        raise UserError(
            f"--validate: {path} has no column {', '.join(missing)}: give the columns of "
            f"{published_path().name}, which comes with the project"
        )
    rows = [_row(columns, f"{path}, row {number}") for number, columns in enumerate(reader, 1)]
    if not rows:
        raise UserError(f"--validate: {path} has no rows: give a file of measurements")
    return rows


def _row(columns: dict[str, str], where: str) -> PublishedStep:
    numbers = {name: _number(columns, name, where) for name in _NUMBERS}
    perhaps = {name: _number(columns, name, where) if columns[name] else None for name in _PERHAPS}
    strategy = columns["strategy"]
    if strategy not in STRATEGIES:
        raise UserError(f"{where}: strategy: got {choices_text(strategy, STRATEGIES)}")
    counts = {name: int(numbers.pop(name)) for name in ("nodes", "ranks_per_node")}
    texts = {name: columns[name] for name in _TEXTS}
    return PublishedStep(columns=columns, **texts, **numbers, **perhaps, **counts)  # type: ignore[arg-type]


def _number(columns: Mapping[str, str], name: str, where: str) -> float:
    """Return a positive number of a column."""
    text = columns[name] or ""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        meaning = _NUMBERS.get(name) or _PERHAPS[name]
        raise UserError(f"{where}: {name}: got {text!r}, give {meaning}, more than 0")
    return value
